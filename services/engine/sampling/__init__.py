"""Drawing of tokens from logits, and their scores.

A request's sampling parameters apply to its row of logits in this order, as in llama.cpp and vLLM:

1. logit_bias is added;
2. repetition_penalty, over prompt and generated tokens;
3. frequency_penalty and presence_penalty, over generated tokens; with penalty_window, these three
   count the last tokens of prompt and output;
4. DRY;
5. the grammar's mask, allowed_token_ids and bad_words, which override all of the above; then the
   ids that min_tokens bans and those that the checkpoint suppresses, unless no other id is left;
6. temperature (0 takes the most likely id and skips the rest);
7. top_k, then top_p, then min_p; or mirostat instead of these three;
8. one uniform number, a function of (seed, choice, position), picks a token.

Scores come from the model's logits, before all of these stages. A stage that no row of a batch uses
is skipped.
"""
