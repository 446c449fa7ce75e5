// Examples of supervised runs and of DPO, trained or held out.

/** Examples: green has weight, the depth of the colour is the loss of the token. */
function examplesView({ examples, tokens }) {
  const asked = state().datum, limit = 5;
  return [bar(tick("colour by loss", "loss"), quiet("Bold tokens count in the loss; the stronger the colour of a token, the less probable it was, up to a log-probability of −5."), quiet(`${examples.length} examples`)),
    make("div", { class: "members two" }, examples.filter((one, i) => i < 200 || String(one.datum) === asked).map((one) => {
      const weights = one.weights || [], logprobs = one.logprobs || [];
      const total = weights.reduce((sum, weight) => sum + Math.abs(weight), 0);
      const loss = weights.reduce((sum, weight, i) => sum - weight * (logprobs[i] || 0), 0) / (total || 1);
      return make("section", { class: `episode ${String(one.datum) === asked ? "chosen" : ""}` }, make("h3", {}, `example ${one.datum}`, one.pair === undefined ? null : make("span", {}, `pair ${one.pair}, ${one.chosen ? "chosen" : "rejected"}`), one.pair === undefined ? null : make("span", {}, `reward ${short(one.reward)}, margin ${short(one.margin)}`), logprobs.length ? make("span", {}, `loss ${short(loss)}`) : null, quiet(`${one.tokens.length} tokens`)),
        pieces(one.tokens, tokens, "tokens", (span, i) => {
          // Position i - 1 predicts token i.
          const weight = weights[i - 1] ?? 0, logprob = logprobs[i - 1];
          span.className = weight ? (weight < 0 ? "down" : "trained") : "context";
          if (settings.loss && weight && isNumber(logprob)) span.style.background = tint(logprob / limit);
          return [`token ${one.tokens[i]}`, `weight ${short(weight)}`, weight && isNumber(logprob) ? `log-probability ${short(logprob)}` : "context"].join("\n");
        }, one.images));
    })), first(200, examples.length)];
}
