//! Text for people: sizes, rates, tables. Units are decimal, as in the names of models and disks.

use std::{array, fmt::Write, iter, path::Path};

pub(super) use df11::hazmat::printable;
use df11::hazmat::{is_unseen, platform, shown};
use serde_json::Value;

/// `2.35 GB`.
pub(super) fn bytes(bytes: u64) -> String {
    scaled(bytes as f64, "B")
}

/// `812 MB/s`.
pub(super) fn rate(bytes: u64, seconds: f64) -> String {
    scaled(per_second(bytes, seconds), "B/s")
}

/// Bytes a second; 0 where no time passed, which JSON can hold.
pub(super) fn per_second(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { bytes as f64 / seconds } else { 0.0 }
}

fn scaled(value: f64, unit: &str) -> String {
    let (mut value, mut prefix) = (value, "");
    for next in ["k", "M", "G", "T", "P"] {
        if value < 999.5 {
            break;
        }
        (value, prefix) = (value / 1000.0, next);
    }
    let digits = match value {
        _ if prefix.is_empty() => 0,
        value if value < 9.995 => 2,
        value if value < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {prefix}{unit}")
}

/// `1.24 s`, `310 ms`, `87 µs`.
pub(super) fn duration(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 0.001 => format!("{:.1} ms", s * 1e3),
        s => format!("{:.0} µs", s * 1e6),
    }
}

/// `67.8 %`.
pub(super) fn percent(part: f64) -> String {
    format!("{:.1} %", 100.0 * part)
}

/// `1 block`, `2 blocks`, `2 aliases`.
pub(super) fn count(number: u64, noun: &str) -> String {
    let plural = if noun.ends_with('s') { "es" } else { "s" };
    format!("{number} {noun}{}", if number == 1 { "" } else { plural })
}

/// Lines in which every character shows.
pub(super) fn printable_lines(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n")
}

/// A document in which characters that would not show are escaped.
pub(super) fn document(json: &Value) -> String {
    let mut out = String::new();
    for c in format!("{json:#}").chars() {
        // The line feeds are those between fields.
        if c == '\n' || !is_unseen(c) {
            out.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a string never fails.
            let _ = write!(out, "\\u{unit:04x}");
        }
    }
    out
}

/// A path as text that cannot drive the terminal.
pub(super) fn path(path: &Path) -> String {
    printable(&shown(path).display().to_string())
}

/// A path as programs read it.
pub(super) fn path_field(path: &Path) -> String {
    shown(path).to_string_lossy().into_owned()
}

/// A path as one argument of a shell, quoted if it must be, for commands that a person copies.
pub(super) fn argument(path: &Path) -> String {
    let text = path.to_string_lossy();
    printable(&platform::quote(&text))
}

/// A column is no wider than this; longer cells move what follows them. Names have up to 4096
/// bytes, and one such would make every row as long.
const WIDEST: usize = 60;

/// Rows of cells under a header; the first column is flush left, the others right.
pub(super) fn table<const N: usize>(
    header: [&str; N],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let rows: Vec<_> = iter::once(header.map(str::to_owned)).chain(rows).collect();
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count().min(WIDEST)).max();
    let widths: [Option<usize>; N] = array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(widths.into_iter().flatten()).enumerate();
        let cells = cells.map(|(column, (cell, width))| match column {
            0 => format!("{cell:width$}"),
            _ => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        let cases = [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.00 kB"),
            (12_345, "12.3 kB"),
            (999_600, "1.00 MB"),
        ];
        for (value, text) in cases {
            assert_eq!(bytes(value), text);
        }
        assert_eq!(bytes(16_060_000_000), "16.1 GB");
        assert_eq!(rate(500, 0.0), "0 B/s");
        assert_eq!(duration(0.31), "310.0 ms");
    }

    #[test]
    fn every_character_of_a_document_shows() {
        let name = "a\u{1b}\u{9b}\u{202E}\u{200B}\u{E0041}é\u{7f}\n\"";
        let json = serde_json::json!({ name: [name, 1] });
        let text = document(&json);
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), json);
        assert!(
            text.contains("a\\u001b\\u009b\\u202e\\u200b\\udb40\\udc41é\\u007f\\n\\\""),
            "{text}"
        );
        assert_eq!(printable_lines("a\u{202E}\nb"), "a\\u{202e}\nb");
    }

    #[test]
    fn columns_line_up() {
        let rows = [["é".to_owned(), "100".to_owned()], ["x".repeat(4096), "1".to_owned()]];
        assert_eq!(table(["name", "n"], rows[..1].to_vec()), "name    n\né     100");
        let text = table(["name", "n"], rows);
        assert_eq!(text.lines().next().unwrap().len(), WIDEST + "  100".len());
        assert!(text.ends_with(&format!("{}    1", "x".repeat(4096))));
    }
}
