"""Operators of torch that a file may name: functional ones, whose results follow from their operands and arguments alone.

None writes to an operand, reads a file, a pointer or memory that nobody wrote, draws random numbers or starts anything. Each
has a kernel for shapes alone, which sees every call before it runs (`file_call.py`), and has been run on random arguments over
memory with guard pages on both sides (tests/conformance/test_hostile_calls.py). Of the operators that `torch.export` leaves to
torch, these are left out: `empty` and others that show old memory, backward passes, sparse, nested and quantised tensors, other
devices' libraries, and operators that failed their tests, such as division with a rounding mode (of the lowest integer by -1 it
ends the process).
"""

from __future__ import annotations

# A name alone is its overload `default`.
_ATEN = """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _add_relu.Tensor _addmm_activation _cdist_forward _conj _conj_physical
    _convolution _ctc_loss _fft_c2c _fft_c2r _fft_r2c _int_mm _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex
    _linalg_svd _log_softmax _native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training _neg_view
    _pdist_forward _prelu_kernel _safe_softmax _softmax _unsafe_index.Tensor _unsafe_view _upsample_bicubic2d_aa
    _upsample_bilinear2d_aa _upsample_lanczos2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _weight_int8pack_mm abs acos acosh adaptive_avg_pool1d adaptive_max_pool2d
    adaptive_max_pool3d add.Scalar add.Tensor addbmm addcdiv addcmul addmm addmv addr affine_grid_generator all all.dim
    all.dims amax amin aminmax angle any any.dim any.dims arange arange.start arange.start_step argmax argmin as_strided
    as_strided_scatter asin asinh atan atan2 atanh avg_pool1d avg_pool2d avg_pool3d baddbmm bartlett_window
    bartlett_window.periodic binary_cross_entropy binary_cross_entropy_with_logits bitwise_and.Scalar
    bitwise_and.Scalar_Tensor bitwise_and.Tensor bitwise_left_shift.Scalar_Tensor bitwise_left_shift.Tensor
    bitwise_left_shift.Tensor_Scalar bitwise_not bitwise_or.Scalar bitwise_or.Scalar_Tensor bitwise_or.Tensor
    bitwise_right_shift.Scalar_Tensor bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_xor.Scalar
    bitwise_xor.Scalar_Tensor bitwise_xor.Tensor blackman_window blackman_window.periodic block_diag bmm bucketize.Scalar
    bucketize.Tensor cat ceil celu channel_shuffle cholesky cholesky_inverse cholesky_solve clamp.Tensor clamp clone
    col2im complex constant_pad_nd conv_tbc convolution copysign.Scalar copysign.Tensor cos cosh count_nonzero
    count_nonzero.dim_IntList cummax cummin cumprod cumsum deg2rad detach diag_embed diagonal diagonal_scatter digamma
    dist div.Scalar div.Tensor dot elu embedding eq.Scalar eq.Tensor erf erfc erfinv exp
    exp2 expand expm1 eye eye.m fft_fftfreq fft_rfftfreq fill.Scalar flip floor floor_divide.Scalar floor_divide fmax fmin
    fmod.Scalar fmod.Tensor frac fractional_max_pool2d fractional_max_pool3d frexp.Tensor full full_like gather gcd
    ge.Scalar ge.Tensor gelu glu grid_sampler_2d grid_sampler_3d gt.Scalar gt.Tensor hamming_window
    hamming_window.periodic hamming_window.periodic_alpha hamming_window.periodic_alpha_beta hann_window
    hann_window.periodic hardshrink hardsigmoid hardswish hardtanh heaviside histc huber_loss hypot i0 igamma igammac
    im2col index.Tensor index_add index_copy index_fill.int_Scalar index_fill.int_Tensor index_put index_reduce index_select
    isin.Scalar_Tensor isin.Tensor_Scalar isin.Tensor_Tensor isinf isnan isneginf isposinf kaiser_window.beta
    kaiser_window kaiser_window.periodic kthvalue lcm ldexp.Tensor le.Scalar le.Tensor leaky_relu lerp.Scalar lerp.Tensor
    lgamma lift_fresh_copy linalg_cholesky_ex linalg_cross linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex
    linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_matrix_exp linalg_pinv.atol_rtol_tensor linalg_qr
    linalg_solve_triangular linalg_vector_norm linspace.Scalar_Tensor linspace.Tensor_Scalar linspace.Tensor_Tensor
    linspace log log10 log1p log2 log_sigmoid_forward logaddexp logaddexp2 logcumsumexp logical_and logical_not logical_or
    logical_xor logit logspace.Scalar_Tensor logspace.Tensor_Scalar logspace.Tensor_Tensor logspace logsumexp lt.Scalar
    lt.Tensor masked_fill.Scalar masked_scatter masked_select max max.dim max_unpool2d max_unpool3d maximum mean mean.dim
    median median.dim min min.dim minimum mish mm mode mse_loss mul.Scalar mul.Tensor mv mvlgamma nan_to_num nanmedian
    nanmedian.dim nansum native_batch_norm native_group_norm native_layer_norm ne.Scalar ne.Tensor neg new_full new_ones
    new_zeros nextafter nll_loss2d_forward nll_loss_forward nonzero nonzero_static norm.Scalar norm.ScalarOpt_dim
    norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype ones ones_like ormqr permute pixel_shuffle pixel_unshuffle polar
    polygamma pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prod prod.dim_int put rad2deg reciprocal reflection_pad1d
    reflection_pad2d reflection_pad3d relu remainder.Scalar remainder.Scalar_Tensor remainder.Tensor renorm repeat
    repeat_interleave.Tensor replication_pad1d replication_pad2d replication_pad3d roll rot90 round.decimals round rsqrt
    rsub.Scalar rsub.Tensor scalar_tensor scatter.reduce scatter.src scatter.value scatter.value_reduce scatter_add
    scatter_reduce.two searchsorted.Scalar searchsorted.Tensor segment_reduce select.int select_scatter sgn sigmoid sign
    signbit silu sin sinc sinh slice.Tensor slice_scatter smooth_l1_loss soft_margin_loss softplus softshrink sort
    sort.stable special_entr special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri
    special_xlog1py special_xlog1py.other_scalar special_xlog1py.self_scalar special_zeta special_zeta.other_scalar
    special_zeta.self_scalar split.Tensor split_with_sizes sqrt squeeze squeeze.dim squeeze.dims stack std.correction
    std_mean.correction sub.Scalar sub.Tensor sum sum.dim_IntList t take tan tanh threshold topk trace transpose.int tril
    triu trunc unbind.int unfold unique_consecutive unique_dim unique_dim_consecutive unsafe_split.Tensor
    unsafe_split_with_sizes unsqueeze upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_trilinear3d var.correction var.dim var_mean.correction vdot view
    view.dtype view_as_complex view_as_real where.self xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor zeros zeros_like
"""
_QUANTIZED_DECOMPOSED = """
    choose_qparams.tensor choose_qparams_per_token choose_qparams_per_token_asymmetric choose_qparams_symmetric.tensor
    convert_element_type.no_fuse dequantize_per_channel dequantize_per_tensor.tensor dequantize_per_tensor.tensor2
    dequantize_per_token quantize_per_channel quantize_per_channel_group quantize_per_tensor quantize_per_tensor.tensor
    quantize_per_tensor.tensor2 quantize_per_token
"""


def _spelt(namespace: str, names: str) -> frozenset[str]:
    return frozenset(f"{namespace}.{n if '.' in n else f'{n}.default'}" for n in names.split())


_OWN = "recurrence recurrent_layer"
ALLOWED = _spelt("aten", _ATEN) | _spelt("quantized_decomposed", _QUANTIZED_DECOMPOSED) | _spelt("tilewright", _OWN)
