"""A model of moedge as lm-eval sees one: log-likelihoods and answers, every request of a call in one batch.

Tokenization, truncation and windows are those of lm-eval's HFLM, so that results can be compared. Importing this file
imports lm-eval, and registers the model there under the name `moedge`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from ... import LLM, RequestOutput, SamplingParams
from ...face import MAX_STOP, errors, options
from .task_names import unknown_tasks

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise errors.MissingExtra("evaluation needs lm-eval", "eval") from error

Scored = tuple[Any, list[int], list[int]]
"""What lm-eval calls a request, the token ids of its context, and those of the continuation that is scored."""

# A scored prompt has one token more than its logits need, and one more is generated.
_BEYOND = 2
# What generation_kwargs of a task may hold beside lengths and stops.
_SAMPLING = frozenset(
    ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
)


@register_model("moedge")
class MoedgeLM(TemplateLM):  # type: ignore[misc]
    """lm-eval's interface to an `LLM`, or to a model that is loaded here with its options.

        with LLM("Qwen/Qwen3-30B-A3B", ram="24GiB") as llm:
            results = lm_eval.simple_evaluate(MoedgeLM(llm), tasks=["arc_easy"])

    `max_length` tokens are read at once at most: what is longer loses its beginning, and rolling windows have this
    length. By default it is two less than `max_model_len` of the LLM. `max_gen_toks` are generated for tasks that do
    not say. `batch_size`, `max_batch_size` and `device` are for other models: memory decides how many sequences run
    together.
    """

    def __init__(
        self,
        pretrained: LLM | str | Path,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
        **options: Unpack[options.LLMOptions],
    ) -> None:
        super().__init__()
        self.llm = pretrained if isinstance(pretrained, LLM) else LLM(pretrained, **options)
        longest = self.llm.max_model_len - _BEYOND
        self.max_length = longest if max_length is None else max_length
        if not 1 <= self.max_length <= longest:
            raise errors.BadArgument(
                f"max_length must be from 1 to {longest:,}, two less than max_model_len; found {self.max_length:,}"
            )
        self.max_gen_toks = max_gen_toks
        self._tokenizer = self.llm.get_tokenizer()

    @property
    def eot_token_id(self) -> int:
        """The token that ends texts; what an empty context becomes where there is no token that begins them."""
        special = self._tokenizer.special_token_id("eos_token")
        found = special if special is not None else next(iter(self._tokenizer.eos_token_ids), None)
        if found is None:
            raise errors.BadArgument(
                "the tokenizer has no eos_token, which an empty context is replaced by; add one to it"
            )
        return found

    @property
    def prefix_token_id(self) -> int:
        begin = self._tokenizer.special_token_id("bos_token")
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        return self.llm.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **others: Any) -> list[int]:
        """As HFLM: with what the tokenizer adds around a text, unless the text begins with it already."""
        if add_special_tokens is None:
            prefix = self._tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not string.startswith(prefix)
        return self._tokenizer.encode_verbatim(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation, with its control tokens. Raises BadArgument for an answer that is begun."""
        if not add_generation_prompt:
            raise errors.BadArgument(
                "moedge begins answers itself: use the task without gen_prefix, or no chat template"
            )
        return self._tokenizer.decode(self._tokenizer.encode_chat(chat_history), skip_special_tokens=False)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the template that conversations get; None where they get none."""
        return self._tokenizer.chat_template if chat_template else None

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of whole texts, in windows of `max_length` tokens that each follow one token."""
        windows, counts = [], []
        for (text,) in (request.args for request in requests):
            found = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            pairs = [make_disjoint_window(pair) for pair in found]
            windows += [(None, *pair) for pair in pairs]
            counts.append(len(pairs))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = [sum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers up to the first stop string; a context that is too long loses its beginning."""
        prompts, params, stops = [], [], []
        for context, given in (request.args for request in requests):
            sampling, stop = self._sampling(given)
            prompts.append(self.tok_encode(context)[-(self.max_length - sampling.max_tokens) :])
            params.append(sampling)
            stops.append(stop)
        outputs = self.llm.generate(prompts, params, progress=not disable_tqdm)
        answers = [
            postprocess_generated_text(_checked(output).outputs[0].text, stop, None)
            for output, stop in zip(outputs, stops, strict=True)
        ]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, answer)
        return answers

    def _sampling(self, given: Mapping[str, Any]) -> tuple[SamplingParams, list[str]]:
        """What a task's generation_kwargs ask for, and its stop strings. Raises BadArgument."""
        found = normalize_gen_kwargs(dict(given), self.max_gen_toks)
        stop = [each for each in found.pop("until", []) if each]
        max_tokens, _ = found.pop("max_gen_toks"), found.pop("do_sample", None)
        if max_tokens >= self.max_length:
            raise errors.BadArgument(
                f"max_gen_toks {max_tokens:,} leave no token of {self.max_length:,} for a prompt; lower max_gen_toks, "
                f"or give the LLM a larger max_model_len"
            )
        if unknown := sorted(found.keys() - _SAMPLING):
            raise errors.BadArgument(
                f"generation_kwargs {', '.join(unknown)} are not known; known are {sorted(_SAMPLING)}"
            )
        return SamplingParams(max_tokens=max_tokens, stop=stop[:MAX_STOP], **found), stop

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **others: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether each token is the likeliest) of each continuation; equal ones are computed once."""
        wanted: dict[tuple[tuple[int, ...], int], tuple[float, bool]] = {}
        keys = [self._prompt(context, continuation) for _, context, continuation in requests]
        distinct = list(dict.fromkeys(keys))
        outputs = self.llm.generate(
            [list(tokens) for tokens, _ in distinct],
            [SamplingParams(max_tokens=1, prompt_logprobs=0, logprob_start_len=start) for _, start in distinct],
            progress=not disable_tqdm,
        )
        for key, output in zip(distinct, outputs, strict=True):
            wanted[key] = _score(_checked(output), key[1])
        scores = [wanted[key] for key in keys]
        for (asked, *_), score in zip(requests, scores, strict=True):
            if asked is not None:
                self.cache_hook.add_partial("loglikelihood", asked, score)
        return scores

    def _prompt(self, context: list[int], continuation: list[int]) -> tuple[tuple[int, ...], int]:
        """Both as one prompt, cut at its beginning, and the position at which the continuation begins."""
        tokens = tuple((context + continuation)[-(self.max_length + 1) :])
        return tokens, max(1, len(tokens) - len(continuation))


def _checked(output: RequestOutput) -> RequestOutput:
    if error := output.outputs[0].error:
        raise errors.PromptError(error)
    return output


def _score(output: RequestOutput, start: int) -> tuple[float, bool]:
    scored = zip(output.prompt_token_ids[start:], (output.prompt_logprobs or [])[start:], strict=True)
    found = [by_id[token_id] for token_id, by_id in scored if by_id is not None]
    return sum(each.logprob for each in found), all(each.rank == 1 for each in found)


def task_manager(tasks: Sequence[str], folder: Path | None = None, *, defaults: bool = True) -> Any:
    """lm-eval's tasks, unless `defaults` is False, and those of the YAML files below `folder`, whose code is run.

    Raises BadArgument for one of `tasks` that is not among them.
    """
    from lm_eval.tasks import TaskManager

    found = TaskManager(include_path=None if folder is None else str(folder), include_defaults=defaults)
    if unknown := [task for task in tasks if not found.match_tasks([task])]:
        raise unknown_tasks(unknown)
    return found


def evaluate(lm: MoedgeLM, tasks: Sequence[str], manager: Any, **options: Any) -> dict[str, Any]:
    """lm-eval's results of `tasks`; `options` are those of its `simple_evaluate`, by default without the answers."""
    from lm_eval import simple_evaluate

    names = manager.match_tasks(list(tasks))
    options = {"log_samples": False, **options}
    found: dict[str, Any] = simple_evaluate(lm, tasks=names, task_manager=manager, **options)
    return found
