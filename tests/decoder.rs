//! Verification through other decoders than the CPU: what it gets is checked as well.

#[path = "support/container.rs"]
mod container;

use std::{
    collections::HashMap,
    ops::Range,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use container::{Item, Model as Sample, normal_weights};
use df11::{
    Error, Level, Model, Result, Tensor,
    hazmat::{Cpu, Decoder, PreparedTensor, demo},
};

/// Decodes whole tensors beforehand, and counts the bytes that are read.
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
    bytes: &'a [u8],
    read: &'a AtomicU64,
}

impl Decoder for Ahead {
    fn prepare<'a>(&'a self, tensor: Tensor<'a>) -> Result<Box<dyn PreparedTensor + 'a>> {
        Ok(Box::new(PreparedAhead { bytes: &self.tensors[tensor.name()], read: &self.read }))
    }
}

impl PreparedTensor for PreparedAhead<'_> {
    fn read(&self, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        out.copy_from_slice(&self.bytes[range.start as usize..range.end as usize]);
        self.read.fetch_add(range.end - range.start, Relaxed);
        Ok(())
    }

    fn verify_index(&self, _: Range<u64>) -> Result<()> {
        Ok(())
    }
}

/// Decodes on the CPU, except for one tensor whose last byte it makes up, or fails to read.
#[derive(Debug)]
struct Liar {
    victim: &'static str,
    fails: bool,
}

struct PreparedLie<'a> {
    truth: Box<dyn PreparedTensor + 'a>,
    last: u64,
    fails: Option<bool>,
}

impl Decoder for Liar {
    fn prepare<'a>(&'a self, tensor: Tensor<'a>) -> Result<Box<dyn PreparedTensor + 'a>> {
        let (truth, last) = (Cpu.prepare(tensor)?, tensor.byte_length()? - 1);
        Ok(Box::new(PreparedLie {
            truth,
            last,
            fails: (tensor.name() == self.victim).then_some(self.fails),
        }))
    }
}

impl PreparedTensor for PreparedLie<'_> {
    fn read(&self, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        self.truth.read(range.clone(), out)?;
        match self.fails {
            Some(fails) if range.contains(&self.last) => {
                if fails {
                    return Err(Error::Gpu {
                        problem: "on fire".into(),
                        remedy: "put it out".into(),
                    });
                }
                *out.last_mut().unwrap() ^= 1;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn verify_index(&self, range: Range<u64>) -> Result<()> {
        self.truth.verify_index(range)
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
    for victim in ["model.layers.2.mlp.up_proj.weight", "model.position_ids", "lm_head.weight"] {
        for fails in [false, true] {
            let liar = Liar { victim, fails };
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
    let item = |count| Item::gap("a", &[count as u64], normal_weights(count, 5), (32, 64));
    // Some number of weights has an odd number of threads.
    let (valid, at) = (1000..2000)
        .find_map(|count| {
            let draft = Sample::new(&[item(count)], &[]).draft();
            let threads = draft.directory.tensors[0].parameters[2].get().div_ceil(8 * 32);
            (threads % 2 == 1).then_some((draft, (threads / 2) as usize))
        })
        .unwrap();
    let mut draft = valid;
    let gaps = draft.first_array("a") + 1;
    draft.array(gaps)[at] |= 0x10;
    draft.repair_checksums();
    let model = container::open(draft.pack()).unwrap();
    let ahead = Ahead::of(&model);
    for decoder in [&Cpu as &dyn Decoder, &ahead] {
        let error = model.verify_with(Level::Full, decoder, &()).unwrap_err();
        assert!(error.to_string().contains("the unused last gap is not zero"), "{error}");
    }
}
