//! Arithmetic of one thread: a function for each operation and type. Registers are 64 bits wide and
//! hold values of fewer bits with zeros above.

pub(crate) type Unary = fn(u64) -> u64;
pub(crate) type Binary = fn(u64, u64) -> u64;
pub(crate) type Ternary = fn(u64, u64, u64) -> u64;

/// The bits of a register that a type has.
pub(crate) fn masked(of: &str, value: u64) -> u64 {
    match of.trim_start_matches(|letter: char| letter.is_ascii_alphabetic()) {
        "8" => value & 0xFF,
        "16" => value & 0xFFFF,
        "32" => value & 0xFFFF_FFFF,
        "64" => value,
        _ => value & 1, // pred
    }
}

fn float(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

fn bits(value: f32) -> u64 {
    value.to_bits().into()
}

/// Rounds to nearest, ties to even; a NaN becomes 0x7FFF, as the GPU has it.
fn bf16(value: f32) -> u64 {
    if value.is_nan() {
        return 0x7FFF;
    }
    let bits = u64::from(value.to_bits());
    (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
}

/// The f32 of which a BF16 is the upper half.
pub(crate) fn widen(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// Whether a shift by so many bits leaves nothing.
fn is_all(by: u64, bits: u64) -> bool {
    by & 0xFFFF_FFFF >= bits
}

macro_rules! binary {
    ($of:expr, $($name:literal => $u:ty, $i:ty;)*) => {
        match $of {
            $($name => |name: &str| -> Option<Binary> {
                const BITS: u64 = <$u>::BITS as u64;
                Some(match name {
                    "add" => |a, b| (a as $u).wrapping_add(b as $u).into(),
                    "sub" => |a, b| (a as $u).wrapping_sub(b as $u).into(),
                    "mul" => |a, b| (a as $u).wrapping_mul(b as $u).into(),
                    "and" => |a, b| (a as $u & b as $u).into(),
                    "or" => |a, b| (a as $u | b as $u).into(),
                    "xor" => |a, b| (a as $u ^ b as $u).into(),
                    "min.u" | "min.b" => |a, b| (a as $u).min(b as $u).into(),
                    "max.u" | "max.b" => |a, b| (a as $u).max(b as $u).into(),
                    "min.s" => |a, b| ((a as $i).min(b as $i) as $u).into(),
                    "max.s" => |a, b| ((a as $i).max(b as $i) as $u).into(),
                    // Without a divisor all bits are set.
                    "div.u" => |a, b| (a as $u).checked_div(b as $u).unwrap_or(<$u>::MAX).into(),
                    "rem.u" => |a, b| (a as $u).checked_rem(b as $u).unwrap_or(a as $u).into(),
                    "shl" => {
                        |a, b| if is_all(b, BITS) { 0 } else { ((a as $u) << b as u32).into() }
                    }
                    "shr.u" | "shr.b" => {
                        |a, b| if is_all(b, BITS) { 0 } else { (a as $u >> b as u32).into() }
                    }
                    "shr.s" => |a, b| (((a as $i) >> (b as u32 as u64).min(BITS - 1)) as $u).into(),
                    "eq" => |a, b| u64::from(a as $u == b as $u),
                    "ne" => |a, b| u64::from(a as $u != b as $u),
                    "lt.u" => |a, b| u64::from((a as $u) < b as $u),
                    "le.u" => |a, b| u64::from(a as $u <= b as $u),
                    "gt.u" => |a, b| u64::from(a as $u > b as $u),
                    "ge.u" => |a, b| u64::from(a as $u >= b as $u),
                    "lt.s" => |a, b| u64::from((a as $i) < b as $i),
                    "le.s" => |a, b| u64::from(a as $i <= b as $i),
                    "gt.s" => |a, b| u64::from(a as $i > b as $i),
                    "ge.s" => |a, b| u64::from(a as $i >= b as $i),
                    _ => return None,
                })
            },)*
            _ => |_: &str| None,
        }
    };
}

/// `add.s32` and the like, and comparisons (`lt.u32`).
pub(crate) fn binary(name: &str, of: &str) -> Option<Binary> {
    if of == "f32" {
        return Some(match name {
            "add" => |a, b| bits(float(a) + float(b)),
            "mul" => |a, b| bits(float(a) * float(b)),
            _ => return None,
        });
    }
    if of == "pred" {
        return Some(match name {
            "and" => |a, b| a & b,
            "or" => |a, b| a | b,
            "xor" => |a, b| a ^ b,
            _ => return None,
        });
    }
    let find = binary!(&of[1..], "16" => u16, i16; "32" => u32, i32; "64" => u64, i64;);
    find(name).or_else(|| find(&format!("{name}.{}", &of[..1])))
}

/// The product in twice as many bits.
pub(crate) fn wide(of: &str) -> Binary {
    match of {
        "u16" => |a, b| u64::from(a as u16) * u64::from(b as u16),
        "u32" => |a, b| u64::from(a as u32) * u64::from(b as u32),
        "s32" => |a, b| (i64::from(a as i32) * i64::from(b as i32)).cast_unsigned(),
        _ => panic!("mul.wide.{of}"),
    }
}

pub(crate) fn unary(name: &str, of: &str) -> Option<Unary> {
    Some(match (name, of) {
        ("not", "pred") => |a| a ^ 1,
        ("not", "b16") => |a| (!(a as u16)).into(),
        ("not", "b32") => |a| (!(a as u32)).into(),
        ("not", "b64") => |a| !a,
        ("neg", "s32") => |a| (a as u32).wrapping_neg().into(),
        ("neg", "s64") => u64::wrapping_neg,
        ("popc", "b32") => |a| (a as u32).count_ones().into(),
        ("brev", "b32") => |a| (a as u32).reverse_bits().into(),
        // By how much to shift for the highest bit to be the last one.
        ("bfind.shiftamt", "u32") => |a| match a as u32 {
            0 => u32::MAX.into(),
            a => a.leading_zeros().into(),
        },
        _ => return None,
    })
}

/// `cvt` with `parts` after it: to, from, and how to round.
pub(crate) fn convert(parts: &[&str]) -> Option<Unary> {
    Some(match parts {
        ["rn", "bf16", "f32"] => |a| bf16(float(a)),
        ["s32", "s8"] => |a| i32::from(a as i8).cast_unsigned().into(),
        ["u16", "u32" | "u64"] => |a| a & 0xFFFF,
        ["u32", "u16" | "u8"] | ["u64", "u32" | "u16"] => |a| a,
        ["u32", "u64"] => |a| a & 0xFFFF_FFFF,
        ["s64", "s32"] => |a| i64::from(a as i32).cast_unsigned(),
        _ => return None,
    })
}

/// Two f32 as BF16, the first one in the upper half.
pub(crate) fn pack_bf16(high: u64, low: u64) -> u64 {
    bf16(float(high)) << 16 | bf16(float(low))
}

/// Bytes of two words chosen by four nibbles; a nibble's high bit asks for the byte's sign alone.
fn permute(a: u64, b: u64, selector: u64) -> u64 {
    let bytes = (a & 0xFFFF_FFFF) | b << 32;
    (0..4).fold(0, |word, place| {
        let nibble = selector >> (4 * place) & 15;
        let byte = bytes >> (8 * (nibble & 7)) & 0xFF;
        let byte = if nibble & 8 == 0 { byte } else { (byte >> 7) * 0xFF };
        word | byte << (8 * place)
    })
}

/// The bits of two words side by side, shifted by up to 31.
fn funnel(low: u64, high: u64) -> u64 {
    (low & 0xFFFF_FFFF) | high << 32
}

pub(crate) fn ternary(name: &str, of: &str) -> Option<Ternary> {
    Some(match (name, of) {
        ("mad.lo", "u32" | "s32") => {
            |a, b, c| (a as u32).wrapping_mul(b as u32).wrapping_add(c as u32).into()
        }
        ("prmt", "b32") => permute,
        ("shf.r.wrap", "b32") => |a, b, c| funnel(a, b) >> (c & 31) & 0xFFFF_FFFF,
        ("shf.l.wrap", "b32") => |a, b, c| funnel(a, b) << (c & 31) >> 32,
        _ => return None,
    })
}

/// Any function of three bits, by its table.
pub(crate) fn look_up(a: u64, b: u64, c: u64, table: u64) -> u64 {
    let each = |row: u64| {
        let choose = |word: u64, wanted: bool| if wanted { word } else { !word };
        let row_bits = choose(a, row & 4 != 0) & choose(b, row & 2 != 0) & choose(c, row & 1 != 0);
        if table >> row & 1 == 0 { 0 } else { row_bits }
    };
    (0..8).fold(0, |word, row| word | each(row)) & 0xFFFF_FFFF
}

/// `b` with `length` bits of `a` from `start` on.
pub(crate) fn insert_bits(a: u64, b: u64, start: u64, length: u64, width: u64) -> u64 {
    let (start, length) = (start & 0xFF, length & 0xFF);
    if length == 0 || start >= width {
        return b;
    }
    let ones = if length >= 64 { u64::MAX } else { (1 << length) - 1 };
    let all = if width == 64 { u64::MAX } else { (1 << width) - 1 };
    let mask = ones << start & all;
    (b & !mask) | (a << start & mask)
}
