//! The tables of spec/format.md against the constants, offsets and sizes in the code.

use std::collections::BTreeMap;

use df11::{
    Dtype, Encoding,
    hazmat::{
        constants as c,
        delta::{self, DeltaSizes},
        format::{
            Header,
            records::{
                ArrayRecord, BlockRecord, ENCODING_ALIAS, ENCODING_DELTA, ENCODING_FLOAT,
                ENCODING_GAP, ENCODING_RAW, ENCODING_TILE, FileRecord, MetadataRecord,
                SECTION_SKIPPABLE, SectionRecord, TensorRecord, section_name,
            },
        },
        stored::CodedSizes as _,
        tile::{BITSTREAM, FloatSplit, PLANE, RECORDS, TileGeometry, TileSizes},
    },
};

pub(crate) const SPEC: &str = include_str!("../../spec/format.md");

/// The cells of all table rows below a heading, down to the next one; without the rows of names and
/// dashes.
fn rows(heading: &str) -> Vec<Vec<String>> {
    let start =
        SPEC.find(&format!("\n{heading}\n")).unwrap_or_else(|| panic!("no heading {heading:?}"));
    let text = &SPEC[start + heading.len() + 2..];
    let lines = text.lines().take_while(|line| !line.starts_with('#'));
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let all: Vec<&str> = lines.filter(|line| line.starts_with('|')).collect();
    let is_dashes = |line: &str| line.starts_with("|---");
    (0..all.len())
        .filter(|&at| !is_dashes(all[at]) && all.get(at + 1).is_none_or(|next| !is_dashes(next)))
        .map(|at| cells(all[at]))
        .collect()
}

fn numbers(text: &str) -> Vec<u64> {
    text.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect()
}

/// The numbers in the last cell of the row of this name.
fn numbers_of(heading: &str, name: &str) -> Vec<u64> {
    let table = rows(heading);
    let row = table.iter().find(|row| row[0] == name).unwrap_or_else(|| panic!("no row {name}"));
    numbers(row.last().unwrap())
}

/// The size of a type such as `u64[4]`.
fn size_of_type(text: &str) -> u64 {
    let numbers = numbers(text);
    numbers[0] / 8 * numbers.get(1).copied().unwrap_or(1)
}

fn check_record(heading: &str, fields: &[(&str, usize, usize)], size: usize) {
    let mut end = 0;
    let rows = rows(heading);
    let rows: Vec<&Vec<String>> = rows.iter().filter(|row| row.len() == 5).collect();
    assert_eq!(rows.len(), fields.len(), "{heading}");
    for (row, &(name, offset, length)) in rows.iter().zip(fields) {
        assert_eq!(row[3], name, "{heading}");
        assert_eq!([row[0].parse(), row[1].parse()], [Ok(offset), Ok(length)], "{heading}: {name}");
        assert_eq!(size_of_type(&row[2]), length as u64, "{heading}: {name}");
        assert_eq!(offset, end, "{heading}: {name} follows the field before");
        end = offset + length;
    }
    assert_eq!(end, size, "{heading}");
}

#[test]
fn records() {
    check_record("### Header", Header::FIELDS, size_of::<Header>());
    check_record("### File", FileRecord::FIELDS, size_of::<FileRecord>());
    check_record("### Block", BlockRecord::FIELDS, size_of::<BlockRecord>());
    check_record("### Section", SectionRecord::FIELDS, size_of::<SectionRecord>());
    check_record("### Tensor", TensorRecord::FIELDS, size_of::<TensorRecord>());
    check_record("### Array", ArrayRecord::FIELDS, size_of::<ArrayRecord>());
    check_record("### Metadata", MetadataRecord::FIELDS, size_of::<MetadataRecord>());
}

#[test]
fn sizes_of_records() {
    let table = rows("## 3. Directory");
    let sizes = table.iter().find(|row| row[0] == "size in bytes").unwrap();
    let expected = [
        size_of::<FileRecord>(),
        size_of::<BlockRecord>(),
        size_of::<SectionRecord>(),
        size_of::<TensorRecord>(),
        size_of::<ArrayRecord>(),
        size_of::<u32>(),
        size_of::<MetadataRecord>(),
        1,
    ];
    assert_eq!(sizes[1..], expected.map(|size| size.to_string()));
}

/// A reader's verdict on the first and the last id of each range of the registry.
#[test]
fn registry() {
    let table = rows("## 11. Registry");
    let ranges: Vec<&Vec<String>> = table.iter().filter(|row| row[1].contains("2^")).collect();
    assert_eq!(ranges.len(), 11);
    for id in [0x4000_0000, 0x7FFF_FFFF, 0x8000_0000, u32::MAX] {
        assert_eq!((Dtype::from_id(id), section_name(id)), (None, None));
    }
    assert_eq!(SECTION_SKIPPABLE, 1 << 31);
}

#[test]
fn constants() {
    let mut table: BTreeMap<String, String> =
        rows("### Constants").into_iter().map(|row| (row[0].clone(), row[1].clone())).collect();
    let magic: Vec<String> = c::MAGIC.iter().map(|byte| format!("{byte:02X}")).collect();
    assert_eq!(table.remove("MAGIC").unwrap(), magic.join(" "));
    for (name, value) in [
        ("VERSION_MAJOR", c::VERSION_MAJOR.into()),
        ("VERSION_MINOR", c::VERSION_MINOR.into()),
        ("HEAD_BYTES", c::HEAD_BYTES),
        ("HEADER_BYTES", c::HEADER_BYTES),
        ("SECTION_ALIGNMENT", c::SECTION_ALIGNMENT),
        ("ARRAY_ALIGNMENT", c::ARRAY_ALIGNMENT),
        ("CHECKSUM_CHUNK_BYTES", c::CHECKSUM_CHUNK_BYTES),
        ("MAX_DIRECTORY_BYTES", c::MAX_DIRECTORY_BYTES),
        ("MAX_FILE_BYTES", c::MAX_FILE_BYTES),
        ("MAX_NAME_BYTES", c::MAX_NAME_BYTES),
        ("MAX_COMPONENT_BYTES", c::MAX_COMPONENT_BYTES),
        ("MAX_PATH_COMPONENTS", c::MAX_PATH_COMPONENTS),
        ("MAX_FILES", c::MAX_FILES),
        ("MAX_FOLDERS", c::MAX_FOLDERS),
        ("MAX_ALIASES", c::MAX_ALIASES),
        ("MAX_KEY_BYTES", c::MAX_KEY_BYTES),
        ("MAX_VALUE_BYTES", c::MAX_VALUE_BYTES),
        ("MAX_METADATA_BYTES", c::MAX_METADATA_BYTES),
        ("MAX_DIMENSIONS", c::MAX_DIMENSIONS),
        ("MAX_SHARDS", c::MAX_SHARDS),
        ("MAX_CODE_LENGTH", c::MAX_CODE_LENGTH.into()),
    ] {
        assert_eq!(table.remove(name).and_then(|text| text.parse().ok()), Some(value), "{name}");
    }
    assert!(table.is_empty(), "constants that the code lacks: {table:?}");
}

#[test]
fn dtypes() {
    let table = rows("## 5. Dtypes");
    assert_eq!(table.len(), Dtype::ALL.len());
    for (row, dtype) in table.iter().zip(Dtype::ALL) {
        assert_eq!(*row, [dtype.id().to_string(), dtype.name().into(), dtype.bits().to_string()]);
    }
}

#[test]
fn encodings() {
    let table = rows("## 6. Encodings");
    let known = [
        (ENCODING_ALIAS, Encoding::Alias),
        (ENCODING_RAW, Encoding::Raw),
        (ENCODING_GAP, Encoding::Gap),
        (ENCODING_TILE, Encoding::Tile),
        (ENCODING_FLOAT, Encoding::Float),
        (ENCODING_DELTA, Encoding::Delta),
    ];
    let known = known.map(|(id, encoding)| [id.to_string(), encoding.name().to_string()]);
    assert!(table.iter().map(|row| &row[..2]).eq(known.iter().map(|pair| &pair[..])));
}

#[test]
fn section_kinds() {
    let table = rows("### Section");
    let kinds: Vec<&Vec<String>> = table.iter().filter(|row| row.len() == 4).collect();
    for (id, row) in (1..).zip(&kinds) {
        assert_eq!(row[0].parse(), Ok(id));
        assert_eq!(section_name(id), Some(&*row[1]));
    }
    assert_eq!((section_name(0), section_name(kinds.len() as u32 + 1)), (None, None));
}

#[test]
fn gap_parameters() {
    let of = |name| numbers_of("### 6.3 gap", name);
    assert_eq!(of("bytes_per_thread"), c::GAP_BYTES_PER_THREAD.map(u64::from));
    assert_eq!(of("threads_per_block"), c::GAP_THREADS_PER_BLOCK.map(u64::from));
    let codebook =
        [c::CODE_LENGTHS_BYTES, c::LUT_BYTES, 1, c::MAX_LUTS].map(|number| number as u64);
    assert_eq!(of("codebook"), codebook);
    assert_eq!(of("output_offsets"), [c::OUTPUT_OFFSET_BYTES as u64, 1]);
    assert_eq!(of("gaps"), [c::GAP_THREADS_PER_BYTE]);
}

/// The numbers of the tables of 6.4, by what geometry and sizes allow.
#[test]
fn tile_parameters() {
    let of = |name| numbers_of("### 6.4 tile", name);
    for tile_columns in 0..10_000 {
        let columns = if tile_columns == 8192 { 40 * 264 } else { 264 };
        let geometry = TileGeometry::new(tile_columns, columns, 40 * 264);
        assert_eq!(geometry.is_ok(), of("tile_columns").contains(&tile_columns), "{tile_columns}");
    }
    let geometry = TileGeometry::new(256, 264, 40 * 264).unwrap();
    let [head, value, least, most] = of("codebook")[..] else { panic!("codebook") };
    for (bytes, right) in [
        (head + value * least, true),
        (head + value * most, true),
        (head - value, false),
        (head + value * most + value, false),
        (head + 1, false),
    ] {
        assert_eq!(
            TileSizes::new(geometry, 1 << 14, bytes).is_ok(),
            right,
            "{bytes} bytes of codebook"
        );
    }
    let [unit, pairs, two, exponent] = of("bit_count")[..] else { panic!("bit_count") };
    assert_eq!((pairs, two.pow(exponent as u32)), (2, 1 << 48));
    for (bit_count, right) in [
        (geometry.elements() / pairs, true),
        (geometry.elements() / pairs - unit, false),
        (1 << 14, true),
        ((1 << 14) + unit / 2, false),
        (1 << exponent, false),
    ] {
        assert_eq!(TileSizes::new(geometry, bit_count, head).is_ok(), right, "{bit_count} bits");
    }
    let sizes = TileSizes::new(geometry, (1 << 14) + unit, head).unwrap();
    let [bytes, more] = of("records")[..] else { panic!("records") };
    let lengths = sizes.array_lengths();
    assert_eq!(lengths[RECORDS], bytes * (geometry.tile_count() + more));
    let [bytes, bits] = of("bitstream")[..] else { panic!("bitstream") };
    assert_eq!(lengths[BITSTREAM], bytes * sizes.bit_count().div_ceil(bits));
    assert_eq!(lengths[PLANE], geometry.elements());
}

/// The lengths of arrays in 6.6.
#[test]
fn delta_lengths() {
    let of = |name| numbers_of("### 6.6 delta", name);
    let [least, most] = of("codebook")[..] else { panic!("codebook") };
    let [unit, segment] = of("bitstream")[..] else { panic!("bitstream") };
    // Three segments.
    let sizes = |codebook, bitstream| {
        DeltaSizes::new([0; 32], (&[(2 << 18) + 1], (2 << 18) + 1), codebook, bitstream)
    };
    for (codebook, right) in [(least - 1, false), (least, true), (most, true), (most + 1, false)] {
        assert_eq!(sizes(codebook, 3 * segment).is_ok(), right, "{codebook} bytes of codebook");
    }
    for (bitstream, right) in
        [(3 * segment - unit, false), (3 * segment, true), (3 * segment + unit / 2, false)]
    {
        assert_eq!(sizes(least, bitstream).is_ok(), right, "{bitstream} bytes of bitstream");
    }
    let [bytes, more] = of("records")[..] else { panic!("records") };
    assert_eq!(sizes(least, 3 * segment).unwrap().arrays()[delta::RECORDS].1, bytes * (3 + more));
}

/// The table of splits in 6.5.
#[test]
fn float_splits() {
    let table = rows("### 6.5 float");
    let table: Vec<&Vec<String>> = table.iter().filter(|row| row.len() == 6).collect();
    for &dtype in Dtype::ALL {
        let row = table.iter().find(|row| row[0] == dtype.name());
        let splits = FloatSplit::all_of(dtype);
        let Some([_, bits, exponent, mantissa, zero_bits, kept]) = row.map(|row| &row[..]) else {
            assert!(splits.is_empty(), "{dtype:?}");
            continue;
        };
        let [bits, exponent, mantissa] = [bits, exponent, mantissa].map(|text| numbers(text)[0]);
        assert_eq!((dtype.bits(), bits), (bits, 1 + exponent + mantissa));
        let splits = splits.iter().rev();
        let found = splits.clone().map(|split| u64::from(split.zero_bits()));
        assert_eq!(found.collect::<Vec<_>>(), numbers(zero_bits));
        let found = splits.clone().map(|split| u64::from(split.kept_bits()));
        assert_eq!(found.collect::<Vec<_>>(), numbers(kept));
        assert!(splits.into_iter().all(|split| u64::from(split.exponent_bits()) == exponent));
    }
}
