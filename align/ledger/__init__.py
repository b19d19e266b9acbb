"""The shadow of the cache (path A): which key and value rows every index wrote and read, and who stomped on whom.

::

    IndexRecord …     what a worker hands over of each step         record; written and read by record.files
      → audit()       static checks, then writes and reads again    ledger; static, writes, attend, sums
      → Wrong …       kind, writer, victim, slot, first bad read    wrong; kinds with source and scope in checks.toml
      → findings()    path A, with a table of the block             explain

The replay stands on the shadow of the cache (``shadow``), on what each request has in it (``state``), on who still
needs a block (``hindsight``) and on the slot formula (``slots``).

:mod:`align.ledger.record` is what workers run; nothing is imported here for the same reason.

Workers see the indices at the operators that write and read the cache (``adapters/probe/cache_operators.tsv``): their
last stop, whatever made them (:mod:`adapters.probe.cache_calls`, :mod:`adapters.probe.indices`). Where the engines make
them, for whoever follows a finding (lmdeploy 0.12.2 with dlinfer-ascend 0.2.7, vllm and vllm-ascend 0.23.0; paths below
the interpreter's ``site-packages``):

lmdeploy
    * Keys, values, slots, one call per layer just before the write: ``lmdeploy/pytorch/kernels/dlinfer/
      fill_kv_cache.py:fill_kv_cache`` (``key_states``, ``value_states``, ``key_caches``, ``value_caches``,
      ``kv_start_indices``). ``lmdeploy/pytorch/backends/dlinfer/attention.py:DlinferAttentionImpl`` keeps it as the
      instance attribute ``fill_kv_cache``, so wrap that attribute of each layer's ``attn_fwd.impl``. Its last stop is
      ``dlinfer/vendor/ascend/torch_npu_ops.py:fill_kv_cache`` (casts the slots to int32).
    * Tables and lengths as attention gets them: ``…/kernels/dlinfer/pagedattention.py:paged_attention_fwd`` (instance
      attribute ``paged_attention_fwd``): ``block_offsets``, ``q_seqlens``, ``kv_seqlens``, ``block_size``,
      ``is_decoding``, ``is_unpaged_prefill``; ``prefill_attention`` and ``paged_token_attention`` lie behind it.
    * They are not canonical there. ``…/backends/dlinfer/ascend/op_backend.py:AscendOpsBackend.update_step_context``
      makes them: ``q_start_loc`` is ``None``; ``q_seqlens`` is ``None`` in decode (take 1 per row); in a paged prefill
      ``block_offsets`` and ``kv_seqlens`` are repeated once per token (keep the first row of each request); an unpaged
      prefill passes ``kv_seqlens = q_seqlens`` and does not read the cache (``paged=False``). Per request and before
      that: ``lmdeploy/pytorch/model_inputs.py:StepContext.new`` (``q_start_loc``, ``q_seqlens``, ``kv_seqlens``,
      ``block_offsets``).
    * Decode slots are derived from ``kv_seqlens`` (``(kv − 1) // b``), prefill slots from ``kv − q``: a wrong length
      moves the write too.
    * Tables are padded with 0 (``lmdeploy/pytorch/engine/inputs_maker.py:_tensorlize_block_offsets``). Block 0 is
      reserved for dummies (``…/engine/config_builder.py``: ``num_reserved_gpu_blocks=1``; dummies are made by
      ``…/strategies/base/model_inputs.py``). Pool: ``kv_caches[layer][0].shape = [blocks, block_size, heads, dim]``.
    * Prefix hits: ``…/paging/block_trie.py``; preemption: ``…/paging/eviction_helper/recompute_eviction_helper.py``.

vllm-ascend
    * Keys, values, slots: ``vllm_ascend/device/device_op.py:BaseDeviceAdaptor.reshape_and_cache`` (of the adaptor that
      ``DeviceOperator`` names), called by ``vllm_ascend/attention/attention_v1.py:
      AscendAttentionBackendImpl.reshape_and_cache``, which knows the layer through ``forward`` and cuts keys and slots
      to ``num_actual_tokens``.
    * Tables and lengths: ``AscendMetadata`` (``attention_v1.py:AscendAttentionMetadataBuilder.build``):
      ``block_tables`` int32 ``[rows, max_blocks]``, ``seq_lens`` / ``seq_lens_list`` per request,
      ``actual_seq_lengths_q`` cumulative ends without the leading 0, ``query_start_loc`` with it, ``slot_mapping``,
      ``attn_state`` (``PrefillNoCache`` reads no cache: ``paged=False``). Read as given to the operator in
      ``_get_fia_params`` and ``forward_fused_infer_attention`` (prefill, chunks, eager decode) and in
      ``forward_paged_attention`` (decode graphs).
    * Made by ``vllm_ascend/worker/block_table.py:BlockTable.compute_slot_mapping`` (kernel
      ``_compute_slot_mapping_kernel``; ``block_size`` there is the kernel's, not the scheduler's) and
      ``vllm_ascend/worker/model_runner_v1.py:_build_attention_metadata`` (pads slots with −1 and table rows with 0).
      ``_prepare_inputs`` knows ``num_computed_tokens`` and the batch order; ``input_batch.block_table[0]`` knows
      ``num_blocks_per_row``.
    * Dummies: ``model_runner_v1.py:NPUModelRunner._dummy_run``. Block 0 is vLLM's null block and belongs to nobody
      (``vllm/v1/core/block_pool.py``). Pool: key cache ``[blocks, block_size, heads, dim]``.
    * MLA: ``vllm_ascend/attention/mla_v1.py:AscendMLAImpl.exec_kv_prefill`` and ``exec_kv_decode`` write
      (``npu_kv_rmsnorm_rope_cache``, slots as int64); tables and lengths stand in ``attn_metadata.prefill`` and
      ``.decode``. The cache is a pair ``[blocks, block_size, 1, lora]``, ``[blocks, block_size, 1, rope]``: take
      the two as "key" and "value".
"""
