//! An open container from which candle reads.

use std::{path::Path, sync::Arc};

use candle_core::{
    CpuStorage, CudaStorage, DType, Device, Error, InplaceOp1, Layout, Result, Shape, Tensor, bail,
};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};

/// How products with compressed matrices are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Decoded first, and multiplied by candle: the bits of the BF16 model.
    Exact,
    /// A GPU multiplies few rows without decoding to memory: faster, sums in another order. On the
    /// CPU as [`Mode::Exact`].
    Fused,
}

/// The weights of a model, which stay compressed. Clones are the same.
#[derive(Clone)]
pub struct Weights {
    inner: Arc<Inner>,
}

struct Inner {
    model: df11::Model,
    device: Device,
    #[cfg(feature = "cuda")]
    gpu: Option<crate::gpu::Gpu>,
}

/// A failure of df11 as one of candle.
pub(crate) fn failed(error: df11::Error) -> Error {
    Error::wrap(error)
}

impl Weights {
    /// Opens a container, or a folder with all its shards, for this device. On the CPU files are
    /// mapped and nothing is read yet; to a GPU the compressed arrays are copied, and stay there.
    ///
    /// # Errors
    /// The errors of [`df11::open`] and of loading onto a GPU; a device that is neither.
    pub fn open(path: impl AsRef<Path>, device: &Device, mode: Mode) -> Result<Self> {
        let model = df11::open(path).map_err(failed)?;
        let inner = match device {
            Device::Cpu => Inner {
                #[cfg(feature = "cuda")]
                gpu: None,
                model,
                device: device.clone(),
            },
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let gpu = Some(crate::gpu::Gpu::load(&model, cuda, mode)?);
                Inner { model, device: device.clone(), gpu }
            }
            _ => bail!(
                "df11 decodes on the CPU and on NVIDIA GPUs; build with the feature cuda for those"
            ),
        };
        // On the CPU there is one way.
        let _ = mode;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// A builder for any model of candle. It decodes tensors; [`Linear`](crate::Linear) and
    /// [`Embedding`](crate::Embedding) keep matrices compressed.
    pub fn var_builder(&self, dtype: DType) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), dtype, self.inner.device.clone())
    }

    /// The device that was given.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The container.
    pub fn model(&self) -> &df11::Model {
        &self.inner.model
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn gpu(&self) -> Option<&crate::gpu::Gpu> {
        self.inner.gpu.as_ref()
    }

    /// Checks that nothing decoded on a GPU so far was damaged; waits for the GPU. On the CPU each
    /// decoding answers itself.
    ///
    /// # Errors
    /// A damaged stream, and failures of the GPU.
    pub fn check(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = self.gpu() {
            return gpu.check();
        }
        Ok(())
    }

    /// The tensor of this name.
    pub(crate) fn tensor(&self, name: &str) -> Result<df11::Tensor<'_>> {
        self.inner
            .model
            .tensor(name)
            .map_err(|_| Error::CannotFindTensor { path: name.to_owned() }.bt())
    }

    /// Decodes a BF16 tensor on the device; nothing else of it stays there.
    pub(crate) fn decode(&self, name: &str) -> Result<Tensor> {
        let tensor = self.tensor(name)?;
        let shape: Vec<usize> = tensor.shape().iter().map(|&size| size as usize).collect();
        let decoded = Tensor::zeros(shape, DType::BF16, self.device())?;
        decoded.inplace_op1(&Decode { weights: self, name })?;
        Ok(decoded)
    }
}

/// Fills a BF16 tensor with the weights of this name.
struct Decode<'w> {
    weights: &'w Weights,
    name: &'w str,
}

impl InplaceOp1 for Decode<'_> {
    fn name(&self) -> &'static str {
        "df11-decode"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        let CpuStorage::BF16(weights) = storage else { bail!("df11 decodes to BF16") };
        self.weights.tensor(self.name)?.decode_into(weights).map_err(failed)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        let Some(gpu) = self.weights.gpu() else { bail!("the weights are not on a GPU") };
        gpu.decode(self.name, storage)
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &mut CudaStorage, _: &Layout) -> Result<()> {
        bail!("build with the feature cuda")
    }
}

impl SimpleBackend for Weights {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if *tensor.shape() != shape {
            let msg = format!("shape mismatch for {name}");
            return Err(Error::UnexpectedShape {
                msg,
                expected: shape,
                got: tensor.shape().clone(),
            }
            .bt());
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let tensor = self.tensor(name)?;
        let shape: Vec<usize> = tensor.shape().iter().map(|&size| size as usize).collect();
        let stored = match tensor.dtype() {
            Some(df11::Dtype::BF16) => DType::BF16,
            Some(df11::Dtype::F16) => DType::F16,
            Some(df11::Dtype::F32) => DType::F32,
            Some(df11::Dtype::F64) => DType::F64,
            Some(df11::Dtype::U8) => DType::U8,
            Some(df11::Dtype::U32) => DType::U32,
            Some(df11::Dtype::I64) => DType::I64,
            other => bail!("candle has no tensors of {other:?}, as {name} is"),
        };
        let bytes = tensor.decode::<u8>().map_err(failed)?;
        Tensor::from_raw_buffer(&bytes, stored, &shape, device)?.to_dtype(dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.inner.model.tensor(name).is_ok()
    }
}
