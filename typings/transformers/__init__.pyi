"""The names of transformers that this repository imports from its top.

The package's own file imports all of its models for checkers of types, which takes 20 s.
"""

from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteriaList as StoppingCriteriaList
from transformers.masking_utils import AttentionMaskInterface as AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import (
    AutoModelForCausalLM as AutoModelForCausalLM,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForImageTextToText as AutoModelForImageTextToText,
)
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config as Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM as Qwen3ForCausalLM
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig as Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLForConditionalGeneration as Qwen3VLForConditionalGeneration,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import (
    PreTrainedTokenizerFast as PreTrainedTokenizerFast,
)
from transformers.trainer_callback import TrainerCallback as TrainerCallback
