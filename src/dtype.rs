//! The element types of tensors (spec/format.md, "Dtypes").

use crate::{Error, Result};

macro_rules! dtypes {
    ($($variant:ident = $id:literal, $name:literal, $bits:literal;)*) => {
        /// The type of a tensor's elements, with the names and sizes of the safetensors format.
        ///
        /// Tensors of BF16, F16, F32, `F8_E4M3` and `F8_E5M2` are entropy-coded; the others are
        /// stored raw.
        #[allow(non_camel_case_types, missing_docs, reason = "the variants are named as \
        safetensors names them")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        #[repr(u32)]
        pub enum Dtype { $($variant = $id),* }

        impl Dtype {
            /// Every dtype of this version, in the order of their ids.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The name in a safetensors header, such as `BF16`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// The size of one element, in bits.
            pub const fn bits(self) -> u64 {
                match self { $(Self::$variant => $bits),* }
            }
        }
    };
}

dtypes! {
    BOOL = 1, "BOOL", 8;
    F4 = 2, "F4", 4;
    F6_E2M3 = 3, "F6_E2M3", 6;
    F6_E3M2 = 4, "F6_E3M2", 6;
    U8 = 5, "U8", 8;
    I8 = 6, "I8", 8;
    F8_E5M2 = 7, "F8_E5M2", 8;
    F8_E4M3 = 8, "F8_E4M3", 8;
    F8_E8M0 = 9, "F8_E8M0", 8;
    F8_E4M3FNUZ = 10, "F8_E4M3FNUZ", 8;
    F8_E5M2FNUZ = 11, "F8_E5M2FNUZ", 8;
    I16 = 12, "I16", 16;
    U16 = 13, "U16", 16;
    F16 = 14, "F16", 16;
    BF16 = 15, "BF16", 16;
    I32 = 16, "I32", 32;
    U32 = 17, "U32", 32;
    F32 = 18, "F32", 32;
    C64 = 19, "C64", 64;
    F64 = 20, "F64", 64;
    I64 = 21, "I64", 64;
    U64 = 22, "U64", 64;
}

impl Dtype {
    /// The id in a container's directory.
    pub const fn id(self) -> u32 {
        self as u32
    }

    /// The dtype with this id, or `None` if this version knows none.
    pub fn from_id(id: u32) -> Option<Self> {
        id.checked_sub(1).and_then(|index| Self::ALL.get(index as usize)).copied()
    }

    /// The dtype with this safetensors name, or `None` if this version knows none.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }

    /// The size in bytes of a tensor of this dtype and shape.
    ///
    /// All dimensions are multiplied before a zero dimension decides, so that `[2^63, 4, 0]`
    /// overflows too.
    ///
    /// # Errors
    /// [`Error::Limit`] if the element count or the size in bits exceeds 2^64 − 1;
    /// [`Error::Parameter`] if the bits do not fill whole bytes.
    pub fn bytes(self, shape: &[u64]) -> Result<u64> {
        let bits = product(shape)?
            .checked_mul(self.bits())
            .ok_or_else(|| Error::overflow("a tensor's size in bits"))?;
        if shape.contains(&0) {
            return Ok(0);
        }
        if bits % 8 == 0 {
            Ok(bits / 8)
        } else {
            Err(Error::parameter(
                format!("a tensor of {bits} bits does not fill whole bytes"),
                "pad its last dimension",
            ))
        }
    }
}

/// The number of elements in a tensor of this shape; an empty shape is a scalar with one element.
///
/// # Errors
/// [`Error::Limit`] if the product of the non-zero dimensions exceeds 2^64 − 1.
pub(crate) fn elements(shape: &[u64]) -> Result<u64> {
    let product = product(shape)?;
    Ok(if shape.contains(&0) { 0 } else { product })
}

/// The product of the dimensions that are not zero.
fn product(shape: &[u64]) -> Result<u64> {
    shape
        .iter()
        .filter(|&&dimension| dimension != 0)
        .try_fold(1u64, |product, &dimension| product.checked_mul(dimension))
        .ok_or_else(|| Error::overflow("the product of a tensor's dimensions"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_names_lead_back() {
        for &dtype in Dtype::ALL {
            assert_eq!(Dtype::from_id(dtype.id()), Some(dtype));
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
        }
        assert_eq!(Dtype::from_id(0), None);
        assert_eq!(Dtype::from_id(23), None);
        assert_eq!(Dtype::from_id(u32::MAX), None);
    }

    #[test]
    fn a_zero_dimension_does_not_hide_an_overflow() {
        assert!(matches!(elements(&[1 << 63, 4, 0]), Err(Error::Limit { .. })));
        assert!(matches!(Dtype::BF16.bytes(&[1 << 60]), Err(Error::Limit { .. })));
        assert_eq!(Dtype::BF16.bytes(&[1 << 59]).unwrap(), 1 << 60);
        assert!(matches!(Dtype::BF16.bytes(&[1 << 60, 0]), Err(Error::Limit { .. })));
        assert_eq!(Dtype::F4.bytes(&[3, 0, 5]).unwrap(), 0);
        assert_eq!(Dtype::F32.bytes(&[]).unwrap(), 4);
        assert!(matches!(Dtype::F4.bytes(&[3]), Err(Error::Parameter { .. })));
    }
}
