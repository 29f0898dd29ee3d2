"""Trains the digits mixture-of-experts with its experts spread over processes, beside the same training in one process.

    python -m paddle.distributed.launch --nproc_per_node 2 tools/expert_parallel.py

On CPU the processes exchange tokens through gloo, on GPUs through NCCL. Each has a share of the experts, a copy of the
other weights, and its part of every batch: tokens go to the processes of their experts, and what the experts make of them
comes back. Exit status 1 unless

- at the first step the gradients of an expert layer equal one process's bit for bit,
- the first step's loss equals one process's up to the order of a sum in FP32,
- each of the losses of all steps is within 1 % of one process's.
"""

import argparse
import os
import sys

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer

from paddle_gated_ops.incubate.nn import RMSNormSiLUGate, WeightedSwiGLUExperts

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "demo"))
import digits  # noqa: E402
from model import CLASSES, EPS, EXPERTS, HIDDEN, INTERMEDIATE, PIXELS, TOP_K  # noqa: E402

BATCH_SIZE = 64
LEARNING_RATE = 1e-3
LABEL_SMOOTHING = 0.1  # keeps the loss from vanishing, whose ratio to another would then be noise
BALANCE = 0.01  # weight of the loss that evens out the experts' loads
LOSS_DEVIATION_AT_MOST = 0.01  # relative, in every step
# Relative, of the first loss: a mean of BATCH_SIZE terms above 0, each added with an error of 2^-24, in any order.
FIRST_LOSS_DEVIATION_AT_MOST = BATCH_SIZE * 2.0**-24


# ---- The exchange of rows


def exchange(rows, send_counts, receive_counts):
    """Sends the first ``send_counts[0]`` rows to process 0, the next ``send_counts[1]`` to process 1, and so on.

    Args:
        rows (Tensor): [sum(send_counts), columns].
        send_counts (list): rows for each process, one's own included.
        receive_counts (list): rows from each process.

    Returns:
        Tensor: [sum(receive_counts), columns], in the order of the processes that sent them.
    """
    if len(send_counts) == 1:
        return rows
    received = paddle.empty([sum(receive_counts), *rows.shape[1:]], rows.dtype)
    if dist.get_backend().upper() == "NCCL":
        dist.alltoall_single(
            out_tensor=received, in_tensor=rows, in_split_sizes=send_counts, out_split_sizes=receive_counts
        )
        return received
    return _exchange_in_pairs(rows, send_counts, receive_counts)


def _exchange_in_pairs(rows, send_counts, receive_counts):
    """What alltoall_single does, of send and recv: gloo has no all-to-all. The processes' number is a power of two.

    Paddle's gloo numbers the calls of each process, and pairs a send with the recv of the same number. So all processes make
    the same number of calls, in rounds in which each has a peer of its own, and no call is left out: where there are no rows
    to send, one of zeros goes, and is dropped.
    """
    rank = dist.get_rank()
    parts = _split(rows, send_counts)
    for distance in range(1, len(send_counts)):
        peer = rank ^ distance
        outgoing = parts[peer] if send_counts[peer] else paddle.zeros([1, *rows.shape[1:]], rows.dtype)
        incoming = paddle.empty([max(receive_counts[peer], 1), *rows.shape[1:]], rows.dtype)
        # A send waits for its recv: of two processes the lower one sends first.
        for sends in (rank < peer, rank > peer):
            if sends:
                dist.send(outgoing, peer)
            else:
                dist.recv(incoming, peer)
        parts[peer] = incoming[: receive_counts[peer]]
    parts = [part for part in parts if part.shape[0]]  # 2.6 joins no empty ones
    return paddle.concat(parts) if parts else paddle.empty([0, *rows.shape[1:]], rows.dtype)


def _split(rows, counts):
    ends = np.cumsum(counts)
    return [rows[end - count : end].contiguous() for end, count in zip(ends, counts)]


class Plan:
    """Who sends how many rows to whom, and in what order an expert sees them.

    Args:
        counts (int array): [processes, experts], how many of each process's rows go to each expert.
        rank (int): this process.

    Attributes:
        tokens_per_expert (list): the rows of each of this process's experts.
    """

    def __init__(self, counts, rank):
        processes, experts = counts.shape
        by_owner = counts.reshape(processes, processes, experts // processes)
        arriving = by_owner[:, rank]  # [from, expert of this process]
        self.send_counts = by_owner[rank].sum(axis=1).tolist()
        self.receive_counts = arriving.sum(axis=1).tolist()
        self.tokens_per_expert = arriving.sum(axis=0).tolist()
        # They arrive sorted by process and then expert; experts want them the other way round. Within an expert rows stay in
        # the order of processes, and so of the whole batch: its products then add in the order of a single process.
        expert_of_row = np.repeat(np.tile(np.arange(arriving.shape[1]), processes), arriving.reshape(-1))
        self.order = np.argsort(expert_of_row, kind="stable")

    def to_experts(self, rows):
        """From this process's rows, sorted by expert, to the rows of this process's experts, sorted by expert."""
        return _permute(exchange(rows, self.send_counts, self.receive_counts), self.order)

    def from_experts(self, rows):
        """The way back."""
        return exchange(_permute(rows, np.argsort(self.order)), self.receive_counts, self.send_counts)


def _permute(rows, order):
    return paddle.gather(rows, paddle.to_tensor(order)) if len(order) else rows


class Exchange(PyLayer):
    """``there`` forward, ``back`` backward: a plan's two ways, or the same the other way round."""

    @staticmethod
    def forward(ctx, rows, there, back):
        ctx.back = back
        return there(rows)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad)


class ParallelExperts(WeightedSwiGLUExperts):
    """This process's share of EXPERTS experts.

    Args:
        rank, processes (int): this one and all; 0 and 1 for all experts in this process.
    """

    def __init__(self, rank, processes):
        super().__init__(EXPERTS // processes, HIDDEN, INTERMEDIATE)
        self.rank, self.processes = rank, processes

    def forward(self, tokens, probs, chosen):
        """From tokens [T, HIDDEN], and the probabilities and the numbers (an array) of their experts, both [T, TOP_K].

        Returns:
            tuple: the experts' weighted sum, [T, HIDDEN], and the loads of all experts over all processes, an array.
        """
        choices = chosen.reshape(-1)
        order = np.argsort(choices, kind="stable")
        counts = self._gather_counts(np.bincount(choices, minlength=EXPERTS))
        plan = Plan(counts, self.rank)
        rows = paddle.gather(tokens, paddle.to_tensor(order // TOP_K))
        row_probs = paddle.gather(probs.reshape([-1, 1]), paddle.to_tensor(order))
        ways = plan.to_experts, plan.from_experts
        rows, row_probs = Exchange.apply(rows, *ways), Exchange.apply(row_probs, *ways)
        out = Exchange.apply(super().forward(rows, row_probs, plan.tokens_per_expert), *reversed(ways))
        out = _permute(out, np.argsort(order))
        return out.reshape([-1, TOP_K, HIDDEN]).sum(axis=1), counts.sum(axis=0)

    def _gather_counts(self, counts):
        if self.processes == 1:
            return counts[None]
        gathered = []
        dist.all_gather(gathered, paddle.to_tensor(counts))
        return np.stack([tensor.numpy() for tensor in gathered])


class MoEClassifier(nn.Layer):
    """The demo's classifier: input projection, experts with a residual connection, gated RMSNorm, head."""

    def __init__(self, rank, processes):
        super().__init__()
        self.input_proj = nn.Linear(PIXELS, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias_attr=False)
        self.experts = ParallelExperts(rank, processes)
        self.gate_proj = nn.Linear(HIDDEN, HIDDEN)
        self.norm = RMSNormSiLUGate(HIDDEN, EPS)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def route(self, tokens):
        """The router's probabilities [T, EXPERTS], and those and the numbers (an array) of the TOP_K highest, [T, TOP_K]."""
        router_probs = F.softmax(self.router(tokens), axis=-1)
        probs, chosen = paddle.topk(router_probs, TOP_K, axis=-1)
        return router_probs, probs, chosen.numpy()

    def loss(self, images, labels):
        """This process's part of the mean loss over a batch of BATCH_SIZE images: the parts of all add up to it."""
        tokens = self.input_proj(images)
        router_probs, probs, chosen = self.route(tokens)
        out, loads = self.experts(tokens, probs, chosen)
        x, z = (tokens + out).astype("bfloat16"), self.gate_proj(tokens).astype("bfloat16")
        logits = self.head(self.norm(x, z).astype("float32"))
        share = paddle.to_tensor(loads / loads.sum(), dtype="float32")
        balance = EXPERTS * (share * router_probs.sum(axis=0)).sum()
        loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=LABEL_SMOOTHING)
        return (loss + BALANCE * balance) / BATCH_SIZE


class Trainee:
    """A model and its optimizer; the experts of process ``rank`` of ``processes``."""

    def __init__(self, rank, processes):
        self.processes = processes
        share = BATCH_SIZE // processes
        self.part = slice(rank * share, (rank + 1) * share)
        self.model = MoEClassifier(rank, processes)
        self.optimizer = paddle.optimizer.AdamW(LEARNING_RATE, parameters=self.model.parameters(), weight_decay=0.01)

    def step(self, images, labels):
        """One training step on a batch of arrays; returns the loss of the whole batch."""
        loss = self.model.loss(paddle.to_tensor(images[self.part]), paddle.to_tensor(labels[self.part]))
        loss.backward()
        total = loss.detach()
        if self.processes > 1:
            dist.all_reduce(total)
            experts = {id(parameter) for parameter in self.model.experts.parameters()}
            for parameter in self.model.parameters():
                if id(parameter) not in experts:  # those have seen every process's rows already
                    dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.clear_grad()
        return float(total)


def share_weights(one, many, rank, processes):
    """Gives the model of many processes the weights of that of one."""
    local = EXPERTS // processes
    mine = slice(rank * local, (rank + 1) * local)
    weights = one.model.state_dict()
    many.model.set_state_dict({n: w[mine] if n.startswith("experts.") else w for n, w in weights.items()})


# ---- What must hold


def same_gradients(one, many, images, rank, processes, seed):
    """Whether output and gradients of the experts in many processes are one process's, bit for bit.

    Tokens and routing are the first batch's; the gradient of the output is normal.
    """
    model = one.model
    with paddle.no_grad():
        tokens = model.input_proj(paddle.to_tensor(images))
        _, probs, chosen = model.route(tokens)
    grad = np.random.default_rng(seed).standard_normal([BATCH_SIZE, HIDDEN], dtype=np.float32)
    tokens, probs = tokens.numpy(), probs.numpy()

    def run(trainee):
        inputs = [paddle.to_tensor(t[trainee.part], stop_gradient=False) for t in (tokens, probs)]
        out, _ = trainee.model.experts(*inputs, chosen[trainee.part])
        paddle.autograd.backward([out], [paddle.to_tensor(grad[trainee.part])])
        weights = trainee.model.experts.parameters()
        arrays = [t.numpy() for t in (out, *(tensor.grad for tensor in (*inputs, *weights)))]
        for weight in weights:
            weight.clear_gradient()
        return arrays

    rows, local = many.part, EXPERTS // processes
    experts = slice(rank * local, (rank + 1) * local)
    same = [
        np.array_equal(a[part].view(np.uint32), b.view(np.uint32))
        for a, b, part in zip(run(one), run(many), (rows, rows, rows, experts, experts))
    ]
    return _all(all(same))


def _all(true):
    """Whether it is true in all processes."""
    if dist.get_world_size() == 1:
        return true
    least = paddle.to_tensor([int(true)])
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return bool(least)


def conditions(same, losses, one_losses):
    """What has to hold: lines (met, text). NaN meets none."""
    deviations = np.abs(np.divide(losses, one_losses) - 1)
    first, worst = float(deviations[0]), float(deviations.max())
    return [
        (same, "gradients of the experts: " + ("bits of one process" if same else "other bits than one process's")),
        (
            first <= FIRST_LOSS_DEVIATION_AT_MOST,
            f"first loss: {first:.1e} from one process's (at most {FIRST_LOSS_DEVIATION_AT_MOST:.1e})",
        ),
        (
            worst <= LOSS_DEVIATION_AT_MOST,
            f"{len(losses)} losses, the last {losses[-1]:.4f}: at most {worst:.1e} from one process's "
            f"(at most {LOSS_DEVIATION_AT_MOST:.0e})",
        ),
    ]


def train(steps, seed):
    """Trains in all processes and in one; returns the conditions."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    data = digits.load(seed)
    paddle.seed(seed)
    one, many = Trainee(0, 1), Trainee(rank, processes)
    share_weights(one, many, rank, processes)
    shuffle = np.random.default_rng(seed)
    losses, one_losses = [], []
    same = None
    for _ in range(steps):
        batch = shuffle.choice(len(data.train_images), BATCH_SIZE, replace=False)
        images, labels = data.train_images[batch], data.train_labels[batch]
        if same is None:
            same = same_gradients(one, many, images, rank, processes, seed)
        losses.append(many.step(images, labels))
        one_losses.append(one.step(images, labels))
    return conditions(same, losses, one_losses)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be 1 or more")

    dist.init_parallel_env()
    processes = dist.get_world_size()
    if EXPERTS % processes or processes & (processes - 1):
        sys.exit(f"error: the processes must be a power of two that divides {EXPERTS} experts, but are {processes}")
    lines = train(arguments.steps, arguments.seed)
    if dist.get_rank() == 0:
        print(f"Experts over {processes} processes on {paddle.get_device()}, {arguments.steps} steps:")
        for met, text in lines:
            print(f"{'ok' if met else 'FAILED':6}  {text}")
    if not all(met for met, _ in lines):
        sys.exit(1)


if __name__ == "__main__":
    main()
