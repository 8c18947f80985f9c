//! The map of x by which kernels for more rows copy it in boxes.
#![expect(unsafe_code, reason = "a call of the driver, with its proof")]

use std::ptr::{from_mut, from_ref};

use cudarc::driver::sys::{
    CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle, cuTensorMapEncodeTiled,
};

use super::{LinearInput, split::WIDE_COLUMNS, task::XMap};
use crate::{Result, gpu::fault::OrFault};

const ELEMENT: u64 = 2;
/// Of which address and pitch must be multiples, in bytes.
const ALIGNMENT: u64 = 16;
/// Pitches must be less, in bytes.
const PITCH_END: u64 = 1 << 40;
const _: () = assert!(size_of::<XMap>() == size_of::<CUtensorMap>());

/// That of these rows of x, of which a box has this many, as `kernels/linear_task.cuh` asks. None
/// if x is not aligned: kernels read it slowly then.
pub(super) fn map_of(x: LinearInput, columns: u32, box_rows: u32) -> Result<Option<XMap>> {
    let pitch = x.pitch * ELEMENT;
    if !(x.pointer | pitch).is_multiple_of(ALIGNMENT) || pitch >= PITCH_END {
        return Ok(None);
    }
    let mut map = XMap::default();
    let (sizes, pitches) = ([u64::from(columns), x.rows], [pitch]);
    let (boxes, every) = ([WIDE_COLUMNS as u32, box_rows], [1_u32; 2]);
    // SAFETY: the map has its size and alignment; of two dimensions there are two sizes, boxes and
    // strides, and one pitch. The driver reads nothing of x.
    let result = unsafe {
        cuTensorMapEncodeTiled(
            from_mut(&mut map).cast::<CUtensorMap>(),
            CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            sizes.len() as u32,
            x.pointer as *mut _,
            from_ref(&sizes).cast(),
            from_ref(&pitches).cast(),
            from_ref(&boxes).cast(),
            from_ref(&every).cast(),
            CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    result.result().or_fault("describing x to the GPU")?;
    Ok(Some(map))
}
