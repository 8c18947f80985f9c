//! Products with matrices that stay compressed.

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::VarBuilder;

use crate::Weights;

/// `y = x Wᵀ (+ bias)`, of which W stays compressed; the bias is decoded once. As
/// [`candle_nn::Linear`], of whose bits it is in [`Mode::Exact`](crate::Mode::Exact).
#[derive(Clone)]
pub struct Linear {
    weights: Weights,
    name: String,
    bias: Option<Tensor>,
    #[cfg(feature = "cuda")]
    fused: Option<std::sync::Arc<crate::gpu::Fused>>,
}

impl Linear {
    /// Loads `weight`, a BF16 matrix of this shape, and `bias` if there is one, at the builder's
    /// path.
    ///
    /// # Errors
    /// If there is no such matrix; failures of the GPU.
    pub fn new(
        weights: &Weights,
        (columns, rows): (usize, usize),
        builder: &VarBuilder,
    ) -> Result<Self> {
        let name = format!("{}.weight", builder.prefix());
        let has_bias = builder.contains_tensor("bias");
        let bias = if has_bias { Some(builder.get(rows, "bias")?) } else { None };
        let tensor = weights.tensor(&name)?;
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        if dtype != Some(df11::Dtype::BF16) || shape != [rows as u64, columns as u64] {
            bail!("{name} is {dtype:?} {shape:?}, not BF16 [{rows}, {columns}]");
        }
        Ok(Self {
            #[cfg(feature = "cuda")]
            fused: crate::gpu::Fused::new(weights, &name)?,
            weights: weights.clone(),
            name,
            bias,
        })
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if let Some(y) = self.fused.as_ref().map(|fused| fused.multiply(x)).transpose()?.flatten() {
            return match &self.bias {
                Some(bias) => y.broadcast_add(bias),
                None => Ok(y),
            };
        }
        // The temporary is dropped after the product: of all matrices one is decoded at a time.
        let weight = self.weights.decode(&self.name)?.to_dtype(x.dtype())?;
        candle_nn::Linear::new(weight, self.bias.clone()).forward(x)
    }
}
