//! Choices from the fuzzer's bytes, in the order in which they stand, so that a changed byte
//! changes one choice.

/// The fuzzer's bytes; zeros follow their end.
pub struct Bytes<'a>(pub &'a [u8]);

impl<'a> Bytes<'a> {
    /// Whether none are left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next `N` bytes.
    pub fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut taken = [0; N];
        let held = self.0.len().min(N);
        taken[..held].copy_from_slice(&self.0[..held]);
        self.0 = &self.0[held..];
        taken
    }

    /// The next byte.
    pub fn u8(&mut self) -> u8 {
        self.take::<1>()[0]
    }

    /// The next two bytes.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    /// The next four bytes.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    /// The next eight bytes.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }

    /// An index below `count`, which is not zero, from two bytes.
    pub fn index(&mut self, count: usize) -> usize {
        usize::from(self.u16()) % count
    }

    /// One of these, by one byte.
    pub fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[usize::from(self.u8()) % items.len()]
    }

    /// Up to `length` bytes.
    pub fn run(&mut self, length: usize) -> &'a [u8] {
        let (run, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        run
    }
}

/// One of these, if there are any.
pub fn at<T>(items: &mut [T], choice: u8) -> Option<&mut T> {
    let count = items.len();
    items.get_mut(usize::from(choice) % count.max(1))
}

/// Changes a subject until the fuzzer's bytes end, `most` times at most; returns how often.
pub fn change<'a>(
    bytes: &mut Bytes<'a>,
    most: usize,
    mut once: impl FnMut(&mut Bytes<'a>),
) -> usize {
    let mut changes = 0;
    while !bytes.is_empty() && changes < most {
        once(bytes);
        changes += 1;
    }
    changes
}

/// Changes bits of one byte of an array.
pub fn flip(array: &mut [u8], bytes: &mut Bytes<'_>) {
    if !array.is_empty() {
        let at = bytes.u32() as usize % array.len();
        array[at] ^= bytes.u8();
    }
}

/// Makes an array up to 128 bytes shorter or 127 longer.
pub fn resize(array: &mut Vec<u8>, bytes: &mut Bytes<'_>) {
    let length = (array.len() + usize::from(bytes.u8())).saturating_sub(128);
    array.resize(length, 0);
}

/// xorshift64* (Vigna 2016): numbers that look random, from a seed.
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 |= u64::from(self.0 == 0);
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }
}
