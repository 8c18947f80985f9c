//! Rows of a matrix that stays compressed.

use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Layout, Module, Result, Shape, Tensor, bail,
};
use candle_nn::VarBuilder;
use half::bf16;

use crate::{Weights, weights::failed};

/// Rows by their indices (U32): as [`candle_nn::Embedding`], of whose bits it is in every mode.
/// Only the rows that are asked for are decoded.
#[derive(Clone)]
pub struct Embedding {
    weights: Weights,
    name: String,
    dtype: DType,
    #[cfg(feature = "cuda")]
    matrix: Option<std::sync::Arc<df11::gpu::Matrix>>,
}

impl Embedding {
    /// Loads `weight`, a BF16 matrix, at the builder's path.
    ///
    /// # Errors
    /// If there is no such matrix.
    pub fn new(weights: &Weights, builder: &VarBuilder) -> Result<Self> {
        let name = format!("{}.weight", builder.prefix());
        let tensor = weights.tensor(&name)?;
        if tensor.dtype() != Some(df11::Dtype::BF16) || tensor.shape().len() != 2 {
            bail!("{name} is {:?} {:?}, no BF16 matrix", tensor.dtype(), tensor.shape());
        }
        Ok(Self {
            #[cfg(feature = "cuda")]
            matrix: weights
                .gpu()
                .map(|gpu| gpu.matrix(&name))
                .transpose()?
                .flatten()
                .map(Into::into),
            weights: weights.clone(),
            name,
            dtype: builder.dtype(),
        })
    }
}

impl Module for Embedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        #[cfg(feature = "cuda")]
        if self.weights.gpu().is_some() && self.matrix.is_none() {
            let rows = self.weights.decode(&self.name)?;
            let columns = rows.dim(1)?;
            return candle_nn::Embedding::new(rows, columns).forward(ids)?.to_dtype(self.dtype);
        }
        ids.contiguous()?.apply_op1_no_bwd(self)?.to_dtype(self.dtype)
    }
}

impl CustomOp1 for Embedding {
    fn name(&self) -> &'static str {
        "df11-embedding"
    }

    fn cpu_fwd(&self, ids: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let tensor = self.weights.tensor(&self.name)?;
        let columns = tensor.shape()[1] as usize;
        let start = layout.start_offset();
        let ids = &ids.as_slice::<u32>()?[start..start + layout.shape().elem_count()];
        let mut output = vec![bf16::ZERO; ids.len() * columns];
        for (&id, row) in ids.iter().zip(output.chunks_exact_mut(columns)) {
            let id = u64::from(id);
            tensor.slice(&[id..id + 1]).and_then(|of| of.decode_into(row)).map_err(failed)?;
        }
        Ok((CpuStorage::BF16(output), shape_of(layout, columns)))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, ids: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let Some(gpu) = self.weights.gpu() else { bail!("the weights are not on a GPU") };
        let Some(matrix) = &self.matrix else { bail!("{} has no rows of tiles", self.name) };
        let (storage, columns) = gpu.gather(matrix, ids, layout)?;
        Ok((storage, shape_of(layout, columns)))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        bail!("build with the feature cuda")
    }
}

/// A row for each index.
fn shape_of(ids: &Layout, columns: usize) -> Shape {
    [ids.shape().dims(), &[columns]].concat().into()
}
