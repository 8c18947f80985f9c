//! Verification through other decoders than the CPU: what it gets is checked as well.

use std::{
    collections::HashMap,
    ops::Range,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use df11::{
    Error, Level, Model, Result, Tensor,
    hazmat::{Cpu, Decoder, PreparedTensor, demo},
};

use crate::{container, files::vector};

/// Decodes whole tensors beforehand, and counts the bytes that are read. Fails to
/// read other tensors.
#[derive(Debug, Default)]
struct Ahead {
    tensors: HashMap<String, Vec<u8>>,
    read: AtomicU64,
}

impl Ahead {
    fn of(model: &Model) -> Self {
        let tensors = model
            .tensors()
            .map(|tensor| (tensor.name().to_owned(), tensor.decode::<u8>().unwrap()));
        Self { tensors: tensors.collect(), read: AtomicU64::new(0) }
    }
}

struct PreparedAhead<'a> {
    bytes: Option<&'a Vec<u8>>,
    read: &'a AtomicU64,
}

impl Decoder for Ahead {
    fn prepare<'a>(&'a self, tensor: Tensor<'a>) -> Result<Box<dyn PreparedTensor + 'a>> {
        Ok(Box::new(PreparedAhead { bytes: self.tensors.get(tensor.name()), read: &self.read }))
    }
}

impl PreparedTensor for PreparedAhead<'_> {
    fn read(&self, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        let on_fire = || Error::Gpu { problem: "on fire".into(), remedy: "put it out".into() };
        let bytes = self.bytes.ok_or_else(on_fire)?;
        out.copy_from_slice(&bytes[range.start as usize..range.end as usize]);
        self.read.fetch_add(range.end - range.start, Relaxed);
        Ok(())
    }

    fn verify_index(&self, _: Range<u64>) -> Result<()> {
        Ok(())
    }
}

#[test]
fn another_decoder_gives_the_same_answers() {
    let folder = tempfile::tempdir().unwrap();
    let model = df11::open(demo::tiny_container(folder.path()).unwrap()).unwrap();
    let ahead = Ahead::of(&model);
    let bytes: u64 = model.tensors().map(|tensor| tensor.byte_length().unwrap()).sum();
    for level in [Level::Structure, Level::Checksums] {
        model.verify_with(level, &ahead, &()).unwrap();
        assert_eq!(ahead.read.load(Relaxed), 0, "nothing is decoded");
    }
    let expected = model.verify(Level::Full, &()).unwrap();
    assert_eq!(model.verify_with(Level::Full, &ahead, &()).unwrap(), expected);
    assert_eq!(ahead.read.swap(0, Relaxed), bytes, "all of it, once");
    for block in model.blocks() {
        let bytes = block.layout().unwrap().bytes as usize;
        let (mut ours, mut theirs) = (vec![1; bytes], vec![2; bytes]);
        block.decode_into(&mut ours).unwrap();
        block.decode_with(&ahead, &mut theirs).unwrap();
        assert!(ours == theirs, "{}", block.name());
    }
}

#[test]
fn what_a_decoder_makes_up_or_fails_at_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let model = df11::open(demo::tiny_container(folder.path()).unwrap()).unwrap();
    for victim in [
        "model.layers.2.mlp.up_proj.weight",
        "model.rotary_emb.inv_freq_positions",
        "lm_head.weight",
    ] {
        for fails in [false, true] {
            let mut liar = Ahead::of(&model);
            let mut bytes = liar.tensors.remove(victim).unwrap();
            if !fails {
                *bytes.last_mut().unwrap() ^= 1;
                liar.tensors.insert(victim.into(), bytes);
            }
            let error = model.verify_with(Level::Full, &liar, &()).unwrap_err();
            assert_eq!(matches!(error, Error::Gpu { .. }), fails, "{error}");
            assert_eq!(matches!(error, Error::Corrupt { .. }), !fails, "{error}");
            assert_eq!(error.to_string().contains(victim), !fails, "{error}");
        }
    }
}

/// The one thing of an index that no decoding uses is checked whatever decodes.
#[test]
fn the_gap_of_no_thread_must_be_zero_for_any_decoder() {
    let model = container::open(vector("invalid/gap-unused-half")).unwrap();
    let ahead = Ahead::of(&model);
    for decoder in [&Cpu as &dyn Decoder, &ahead] {
        let error = model.verify_with(Level::Full, decoder, &()).unwrap_err();
        assert!(error.to_string().contains("the unused last gap is not zero"), "{error}");
    }
}
