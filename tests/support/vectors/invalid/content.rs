//! Sections 3, 4 and 7: checksums, hashes, zeros, prefixes.

use df11::{Dtype, hazmat::constants::NONE};

use super::{coded, edited, edited_of, plain, remade};
use crate::container::{Draft, Item, Model, Tensor, with_length};
use crate::vectors::Vector;

/// Bytes whose checksums or hashes are wrong, and bytes that must be zero.
#[allow(clippy::too_many_lines, reason = "a list, not steps")]
pub(super) fn content() -> Vec<Vector> {
    let invalid =
        |name: &str, level: &str, about: &str, bytes| Vector::invalid(name, level, about, bytes);
    let edit = |name: &str, about: &str, edit: fn(&mut Draft)| {
        invalid(name, "verify", about, edited(edit))
    };
    let remake = |name: &str, about: &str, model: Model, edit: fn(&mut Model)| {
        invalid(name, "verify", about, remade(model, edit))
    };
    // Sections of the plain model: raw in block 0, prefix, side.
    let flipped = |name: &str, level: &str, about: &str, model: &Model, section: usize, byte| {
        let bytes = edited_of(model, |draft| draft.contents[section][byte] ^= 1);
        invalid(name, level, about, bytes)
    };
    let coded = coded();
    let padding = |name: &str, about: &str, section: usize, byte: usize| {
        let mut bytes = plain().build();
        let offset = plain().draft().directory.sections[section].offset.get() as usize;
        assert_eq!(bytes[offset + byte], 0);
        bytes[offset + byte] = 1;
        invalid(name, "verify", about, bytes)
    };
    let mut skippable = plain();
    skippable.extra_sections.push((NONE, u32::MAX, b"new".to_vec()));
    vec![
        flipped("checksum-raw", "load", "a wrong byte of a raw tensor", &plain(), 0, 0),
        flipped("checksum-codebook", "load", "a wrong byte of a codebook", &coded, 0, 0),
        flipped("checksum-index", "load", "a wrong byte of a gap", &coded, 1, 3),
        flipped("checksum-bitstream", "load", "a wrong byte of a bitstream", &coded, 2, 700),
        flipped("checksum-plane", "load", "a wrong byte of a plane", &coded, 3, 700),
        flipped("checksum-prefix", "verify", "a wrong byte of a prefix", &plain(), 1, 9),
        flipped("checksum-side", "verify", "a wrong byte of a side file", &plain(), 2, 0),
        flipped(
            "checksum-unknown",
            "verify",
            "a wrong byte of a section to skip",
            &skippable,
            3,
            0,
        ),
        edit(
            "zeros-between-arrays",
            "a byte between two arrays, under a right checksum",
            |draft| {
                draft.contents[0][255] = 1;
                draft.repair_checksums();
            },
        ),
        padding("zeros-between-sections", "a byte between two sections", 0, 4095),
        padding(
            "zeros-before-directory",
            "a byte between the last section and the directory",
            2,
            3,
        ),
        edit("hash-of-tensor", "another hash of a tensor", |draft| {
            draft.directory.tensors[0].hash[31] ^= 1;
        }),
        remake(
            "hash-of-coded-tensor",
            "a coded tensor of other weights than its hash says",
            coded.clone(),
            |model| model.tensor("w").arrays[4].1[100] ^= 0x80,
        ),
        invalid("hash-of-empty-tensor", "verify", "another hash of a tensor without bytes", {
            let items = [Item::raw("x", Dtype::U8, &[0], vec![])];
            remade(Model::new(&items, &[]), |model| model.tensors[0].hash[0] ^= 1)
        }),
        remake("hash-of-weights-file", "another hash of a weights file", plain(), |model| {
            model.files[0].hash[0] ^= 1;
            model.identity = model.identity_of_files();
        }),
        remake("hash-of-side-file", "another hash of a side file", plain(), |model| {
            model.files[1].hash[0] ^= 1;
            model.identity = model.identity_of_files();
        }),
        remake(
            "identity-without-side-files",
            "an identity of the weights files alone",
            plain(),
            |model| {
                let side = model.files.pop();
                model.identity = model.identity_of_files();
                model.files.extend(side);
            },
        ),
        invalid(
            "zeros-in-unknown-section",
            "verify",
            "a byte between arrays of a section to skip",
            {
                let mut model = plain();
                model.tensors[0].encoding = 77;
                model.tensors[0].arrays = vec![(u32::MAX, vec![1; 5]), (u32::MAX, vec![2; 5])];
                edited_of(&model, |draft| {
                    let at =
                        draft.directory.sections.iter().position(|s| s.kind == u32::MAX).unwrap();
                    draft.contents[at][100] = 1;
                    draft.repair_checksums();
                })
            },
        ),
        remake("identity", "another identity", plain(), |model| model.identity[0] ^= 1),
    ]
}

/// Section 7.
pub(super) fn weights_files() -> Vec<Vector> {
    let items = || {
        vec![
            Item::raw("a", Dtype::U8, &[4], vec![1, 2, 3, 4]),
            Item::raw("b", Dtype::U8, &[4], vec![5, 6, 7, 8]),
            Item::raw("none", Dtype::U8, &[0], vec![]),
        ]
    };
    let invalid = |name: &str, about: &str, bytes| Vector::invalid(name, "verify", about, bytes);
    // The directory of one model, the prefix of another; hashes and identity fit.
    let other_prefix = |prefix: Vec<u8>| {
        let mut model = Model::new(&items(), &[]);
        let shift = prefix.len() as u64;
        let before = model.files[0].arrays[0].1.len() as u64;
        model.files[0].arrays[0].1 = prefix;
        model
            .tensors
            .iter_mut()
            .for_each(|tensor| tensor.file_offset = tensor.file_offset + shift - before);
        model.refresh();
        model.build()
    };
    let header_of = |name: &str, about: &str, edit: &dyn Fn(&mut Vec<Item>)| {
        let mut items = items();
        edit(&mut items);
        invalid(name, about, other_prefix(crate::container::prefix(items.iter())))
    };
    let moved = |name: &str, about: &str, at: usize, by: i64| {
        let bytes = edited_of(&Model::new(&items(), &[]), |draft| {
            let tensor = &mut draft.directory.tensors[at];
            tensor.file_offset = tensor.file_offset.get().wrapping_add_signed(by).into();
        });
        invalid(name, about, bytes)
    };
    let remake = |name: &str, about: &str, edit: fn(&mut Model)| {
        invalid(name, about, remade(Model::new(&items(), &[]), edit))
    };
    let whole = crate::container::prefix(items().iter());
    let mut wrong_length = whole.clone();
    wrong_length[0] -= 8;
    vec![
        moved("tensors-overlap", "two tensors of a file share a byte", 1, -1),
        moved("tensor-in-prefix", "a tensor that starts within the prefix", 0, -1),
        moved("empty-tensor-in-prefix", "a tensor without bytes within the prefix", 2, -9),
        moved("empty-tensor-inside", "a tensor without bytes within another one", 2, -6),
        remake("tensors-leave-hole", "bytes of a file that no tensor has", |model| {
            model.files[0].length += 1;
            model.tensors[1].file_offset += 1;
            model.identity = model.identity_of_files();
        }),
        remake("tensors-end-early", "bytes at the end of a file that no tensor has", |model| {
            model.files[0].length = 1 << 62;
            model.identity = model.identity_of_files();
        }),
        remake(
            "tensors-swapped",
            "a directory with two tensors of one size in each other's places",
            |model| {
                let [first, second] = [0, 1].map(|at| model.tensors[at].file_offset);
                (model.tensors[0].file_offset, model.tensors[1].file_offset) = (second, first);
                model.refresh();
            },
        ),
        header_of("prefix-name", "another name in the header", &|items| items[1].name = "B".into()),
        header_of("prefix-dtype", "another dtype in the header", &|items| {
            items[1].dtype.1 = "I8".into();
        }),
        header_of("prefix-shape", "another shape in the header", &|items| {
            items[1].shape = vec![2, 2];
        }),
        header_of("prefix-order", "other data_offsets in the header", &|items| items.swap(0, 1)),
        header_of("prefix-tensor-missing", "a tensor that is not in the header", &|items| {
            drop(items.pop());
        }),
        header_of("prefix-tensor-more", "a tensor that is only in the header", &|items| {
            items.push(Item::raw("more", Dtype::U8, &[0], vec![]));
        }),
        invalid(
            "prefix-length",
            "a prefix with a length of its own that is too small",
            other_prefix(wrong_length),
        ),
        invalid("prefix-no-json", "a prefix that is no JSON", other_prefix(with_length("{\"a\":"))),
        invalid("prefix-empty", "a prefix of four bytes", other_prefix(vec![0; 4])),
        invalid("prefix-duplicate-key", "a header with one tensor twice", {
            let json = std::str::from_utf8(&whole[8..]).unwrap().trim_end();
            let again = r#","a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
            other_prefix(with_length(&(json.strip_suffix('}').unwrap().to_owned() + again)))
        }),
    ]
}

/// What of a safetensors header is JSON of another shape than section 7 wants.
#[allow(clippy::too_many_lines, reason = "a list, not steps")]
pub(super) fn headers() -> Vec<Vector> {
    // A header of one tensor, whose bytes are there; hashes and identity fit.
    let of = |json: &[u8]| {
        let mut model = Model::new(&[Item::raw("a", Dtype::U8, &[4], vec![1, 2, 3, 4])], &[]);
        let mut prefix = (json.len() as u64).to_le_bytes().to_vec();
        prefix.extend(json);
        model.tensors[0].file_offset = prefix.len() as u64;
        model.files[0].arrays[0].1 = prefix;
        model.refresh();
        model.build()
    };
    let good = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    let invalid = |name: &str, about: &str, bytes| {
        Vector::invalid(&format!("header-{name}"), "verify", about, bytes)
    };
    let entry = |name: &str, about: &str, entry: &str| {
        invalid(name, about, of(format!(r#"{{"a":{entry}}}"#).as_bytes()))
    };
    // A header of these dtype, shape and data_offsets, and more.
    let members = |name: &str, about: &str, [dtype, shape, offsets]: [&str; 3], more: &str| {
        let members = format!(r#""dtype":{dtype},"shape":{shape},"data_offsets":{offsets}{more}"#);
        entry(name, about, &format!("{{{members}}}"))
    };
    // The good header with this before its first member.
    let before = |name: &str, about: &str, text: &str| {
        invalid(name, about, of(good.replacen('{', text, 1).as_bytes()))
    };
    let u8 = r#""U8""#;
    vec![
        entry("entry-list", "an entry that is a list", r#"["U8",[4],[0,4]]"#),
        members(
            "dtype-object",
            "a dtype that is an object",
            [r#"{"U8":null}"#, "[4]", "[0,4]"],
            "",
        ),
        members("dtype-case", "a dtype in other letters", [r#""u8""#, "[4]", "[0,4]"], ""),
        members("shape-fraction", "a dimension of 4.0", [u8, "[4.0]", "[0,4]"], ""),
        members("shape-exponent", "a dimension of 4e0", [u8, "[4e0]", "[0,4]"], ""),
        members("shape-text", "a dimension that is a string", [u8, r#"["4"]"#, "[0,4]"], ""),
        members("shape-huge", "a dimension of 2^64", [u8, "[18446744073709551616]", "[0,4]"], ""),
        members("offset-minus-zero", "an offset of -0", [u8, "[4]", "[-0,4]"], ""),
        members("offset-true", "an offset that is true", [u8, "[4]", "[false,4]"], ""),
        members("offsets-three", "three data_offsets", [u8, "[4]", "[0,4,4]"], ""),
        entry(
            "member-missing",
            "an entry without a shape",
            r#"{"dtype":"U8","data_offsets":[0,4]}"#,
        ),
        entry(
            "member-twice",
            "an entry with one member twice",
            r#"{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}"#,
        ),
        members(
            "key-twice-escaped",
            "one key twice, once with an escape, in a member that no reader knows",
            [u8, "[4]", "[0,4]"],
            r#","x":{"b":1,"\u0062":2}"#,
        ),
        before("metadata-number", "__metadata__ with a number", r#"{"__metadata__":{"x":1},"#),
        before("metadata-list", "__metadata__ that is a list", r#"{"__metadata__":[],"#),
        before(
            "surrogate",
            "an escape of half a surrogate pair",
            r#"{"__metadata__":{"x":"\ud800"},"#,
        ),
        invalid("list", "a header that is a list", of(b"[]")),
        invalid("two-values", "two JSON values", of(format!("{good} {{}}").as_bytes())),
        invalid("comma", "a comma after the last entry", of(good.replace("}}", "},}").as_bytes())),
        invalid("zero-padding", "padding of NUL", of(format!("{good}\0\0\0").as_bytes())),
        invalid("byte-order-mark", "a byte order mark", of(format!("\u{feff}{good}").as_bytes())),
        invalid("not-utf8", "a byte that no UTF-8 text has", {
            of(&[
                &good.as_bytes()[..1],
                br#""__metadata__":{"x":""#,
                b"\xFF",
                br#""},"#,
                &good.as_bytes()[1..],
            ]
            .concat())
        }),
        members("nan", "NaN, which is no JSON", [u8, "[4]", "[0,4]"], r#","x":NaN"#),
        before("control", "a control character in a string", "{\"__metadata__\":{\"x\":\"\t\"},"),
    ]
}

/// Headers of files in which one tensor is Unsupported: the others must be compared all the same.
#[allow(clippy::too_many_lines, reason = "a list, not steps")]
pub(super) fn neighbours() -> Vec<Vector> {
    let invalid = |name: &str, about: &str, bytes| Vector::invalid(name, "verify", about, bytes);
    let items = [
        Item::raw("a", Dtype::U8, &[4], vec![1, 2, 3, 4]),
        Item::raw("b", Dtype::U8, &[4], vec![5, 6, 7, 8]),
        Item::raw("c", Dtype::U8, &[4], vec![9; 4]),
    ];
    // The header of one model, the directory of another, in which `b` is Unsupported.
    let with =
        |name: &str, about: &str, header: &dyn Fn(&mut [Item]), newer: &dyn Fn(&mut Tensor)| {
            let mut model = Model::new(&items, &[]);
            let mut others = items.clone();
            header(&mut others);
            let prefix = crate::container::prefix(others.iter());
            let before = model.files[0].arrays[0].1.len() as u64;
            for tensor in &mut model.tensors {
                tensor.file_offset = tensor.file_offset + prefix.len() as u64 - before;
            }
            model.files[0].arrays[0].1 = prefix;
            newer(model.tensor("b"));
            model.refresh();
            invalid(name, about, model.build())
        };
    let encoding = |tensor: &mut Tensor| tensor.encoding = 77;
    let dtype = |tensor: &mut Tensor| tensor.dtype = 99;
    let posit = |items: &mut [Item]| items[1].dtype.1 = "POSIT8".into();
    let and = |edit: fn(&mut [Item])| {
        move |items: &mut [Item]| {
            posit(items);
            edit(items);
        }
    };
    vec![
        with(
            "neighbour-of-unknown-encoding",
            "another dtype beside a tensor of an unknown encoding",
            &|items| items[2].dtype.1 = "I8".into(),
            &encoding,
        ),
        with(
            "neighbour-of-unknown-dtype",
            "another dtype beside a tensor of an unknown one",
            &and(|items| items[2].dtype.1 = "I8".into()),
            &dtype,
        ),
        with(
            "neighbour-name",
            "another name beside a tensor of an unknown dtype",
            &and(|items| items[2].name = "C".into()),
            &dtype,
        ),
        with(
            "unknown-dtype-named",
            "a dtype that is unknown, and named by the header",
            &|_| {},
            &dtype,
        ),
        with(
            "known-dtype-unnamed",
            "a dtype that is known, and has a name of no dtype",
            &posit,
            &|_| {},
        ),
        with(
            "unknown-dtype-shape",
            "another shape of a tensor of an unknown dtype",
            &and(|items| items[1].shape = vec![2, 2]),
            &dtype,
        ),
        with(
            "unknown-dtype-offset",
            "another place of a tensor of an unknown dtype",
            &posit,
            &|tensor| {
                tensor.dtype = 99;
                tensor.file_offset += 1;
            },
        ),
        with(
            "unknown-dtype-ends-early",
            "a tensor of an unknown dtype ends before the next one starts",
            &and(|items| items[1].length = 3),
            &dtype,
        ),
    ]
}
