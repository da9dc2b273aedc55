"""Model definitions, their layers, and the way between Hugging Face folders and parameters.

Every model here is called on one packed row, `model(tokens_T, documents, targets_T, temperatures_T)`, returns
`(logprobs_T, entropies_T)` and names its parameters as Hugging Face does. Nothing here knows about rollouts, losses or
ranks.

Under FSDP's mixed precision the root's policy needs `cast_forward_inputs=False`: temperatures stay float32.
"""
