"""Peak memory of `token_logprob`, forward + backward, against a materialised log-softmax, each in its own process.
The latter, which grows with the tokens, is measured with an eighth of them and multiplied.

python -P tests/bench/logprob.py [tokens] [vocabulary]     defaults 8192 x 152,000, d 64; ends in one JSON object
"""

from __future__ import annotations

import json
import subprocess
import sys

D, SHARE = 64, 8
PROGRAM = """
import resource, torch
from headway.kernels.logprob import token_logprob
torch.set_num_threads(1)
g = torch.Generator().manual_seed(0)
n, v, d, ours = {n}, {v}, {d}, {ours}
hidden, head = torch.randn(n, d, generator=g, requires_grad=True), torch.randn(v, d, generator=g, requires_grad=True)
targets = torch.randint(v, (n,), generator=g)
token_logprob(hidden[:16], head[:64], targets[:16] % 64)[0].sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if ours:
    chosen = token_logprob(hidden, head, targets)[0]
else:
    chosen = torch.log_softmax(hidden @ head.T, -1).gather(1, targets[:, None])[:, 0]
chosen.sum().backward()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
same = True
if ours:
    with torch.no_grad():
        for at in range(0, n, n // 16):
            same &= torch.equal(token_logprob(hidden[at : at + 1], head, targets[at : at + 1])[0], chosen[at : at + 1])
print(peak, int(same))
"""


def main() -> None:
    n, v = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((1, 8192), (2, 152_000)))
    peaks, same = {}, False
    for name, rows in (("chunked", n), ("materialised", n // SHARE)):
        program = PROGRAM.format(n=rows, v=v, d=D, ours=name == "chunked")
        out = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
        peak, bits = map(int, out.stdout.split())
        peaks[name] = peak / 1024 * n / rows
        same = bool(bits) if name == "chunked" else same
    ratio = peaks["chunked"] / peaks["materialised"]
    print(f"{n} x {v}: chunked {peaks['chunked']:,.0f} MB, materialised {peaks['materialised']:,.0f} MB; {ratio:.3f}")
    targets = {
        "peak_ratio": [round(ratio, 4), "<=", 0.125, ratio <= 0.125],
        "bits_of_single_rows": [same, "is", True, same],
    }
    figures = {f"{name}_mb": round(peak) for name, peak in peaks.items()}
    print(json.dumps({"name": "logprob", "figures": figures, "targets": targets}))


if __name__ == "__main__":
    main()
