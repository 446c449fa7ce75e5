// The trained examples of supervised runs and of DPO.

/** Trained examples: green has weight, the depth of the colour is the loss of the token. */
function examplesView({ examples, tokens }) {
  const overlay = settings.loss !== false;
  const bar = make("div", { class: "bar" }, control("colour by loss", make("input", { type: "checkbox", checked: overlay, onchange: (event) => { settings.loss = event.target.checked; redraw(); } })),
    make("span", { class: "quiet" }, "Bold tokens are trained; the darker a token, the less probable it was."));
  return [bar, ...examples.slice(0, 200).map((one) => {
    const weights = one.weights || [], logprobs = one.logprobs || [];
    const total = weights.reduce((sum, weight) => sum + Math.abs(weight), 0);
    const loss = weights.reduce((sum, weight, i) => sum - weight * (logprobs[i] || 0), 0) / (total || 1);
    return make("section", { class: "episode" }, make("h3", {}, `example ${one.datum}`, make("span", {}, `loss ${short(loss)}`), make("span", { class: "quiet" }, `${one.tokens.length} tokens`)),
      pieces(one.tokens, tokens, "tokens", (span, i) => {
        // Position i - 1 predicts token i.
        const weight = weights[i - 1] ?? 0, logprob = logprobs[i - 1];
        span.className = weight ? (weight < 0 ? "down" : "trained") : "context";
        if (overlay && weight && logprob !== undefined) span.style.background = tint(logprob / 5, 0.8);
        return [`token ${one.tokens[i]}`, `weight ${short(weight)}`, weight && logprob !== undefined ? `log-probability ${short(logprob)}` : "context"].join("\n");
      }));
  })];
}
