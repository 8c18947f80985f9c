//! Findings as an SVG picture of two charts: how often each exponent occurs, and bits per weight by
//! block.
//!
//! The picture has its own background and follows the colour scheme of its viewer, so it is legible
//! on any page.

use std::fmt::Write;

use df11::hazmat::{huffman::Histogram, is_unseen};

use super::Part;
use crate::cli::{figures::Figures, text};

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 760.0;
/// Left and right edge of both charts.
const LEFT: f64 = 72.0;
const RIGHT: f64 = WIDTH - 28.0;
/// Exponents at either end that are rarer than this are summed up in words.
const RARE: f64 = 0.0005;
const BF16_BITS: f64 = 16.0;
const LABEL_CHARS: usize = 22;
/// The most labels of blocks that stand side by side.
const LABELS: usize = 42;

const STYLE: &str = "
  svg { --back: #ffffff; --text: #1f2328; --muted: #59636e; --grid: #d8dee4; --plane: #aab4bf; \
  --code: #0969da; --mark: #bc4c00 }
  @media (prefers-color-scheme: dark) {
    svg { --back: #0d1117; --text: #e6edf3; --muted: #9198a1; --grid: #30363d; --plane: #57606a; \
    --code: #4493f8; --mark: #f0883e }
  }
  text { font: 12px system-ui, sans-serif; fill: #59636e; fill: var(--muted) }
  .title { font-size: 18px; font-weight: 600; fill: #1f2328; fill: var(--text) }
  .chart { font-size: 14px; font-weight: 600; fill: #1f2328; fill: var(--text) }
  .back { fill: #ffffff; fill: var(--back) }
  .grid { stroke: #d8dee4; stroke: var(--grid) }
  .axis { stroke: #59636e; stroke: var(--muted) }
  .limit { stroke: #59636e; stroke: var(--muted); stroke-dasharray: 5 4 }
  .plane { fill: #aab4bf; fill: var(--plane) }
  .code { fill: #0969da; fill: var(--code) }
  .mark { stroke: #bc4c00; stroke: var(--mark); stroke-width: 2.5 }
  .end { text-anchor: end } .middle { text-anchor: middle }
";

/// A value axis from 0 at `bottom` to `max` at `top`.
struct Axis {
    top: f64,
    bottom: f64,
    max: f64,
}

impl Axis {
    fn y(&self, value: f64) -> f64 {
        self.bottom - (self.bottom - self.top) * value / self.max
    }

    /// Grid lines with labels.
    fn draw(&self, svg: &mut String, step: f64, unit: &str) {
        let mut value = 0.0;
        while value <= self.max + step / 1e3 {
            let (y, class) = (self.y(value), if value == 0.0 { "axis" } else { "grid" });
            line(svg, class, [LEFT, y, RIGHT, y]);
            let tick = format!("{}{unit}", (100.0 * value).round() / 100.0);
            label(svg, "end", LEFT - 8.0, y + 4.0, &tick);
            value += step;
        }
    }
}

/// The whole picture; `title` is the container's name.
pub(super) fn draw(part: &Part<'_>, title: &str) -> String {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
        width=\"{WIDTH}\" height=\"{HEIGHT}\" \
        role=\"img\">\n<title>{0}</title>\n<style>{STYLE}</style>\n\
         <rect class=\"back\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>\n",
        escape(title)
    );
    label(&mut svg, "title", 24.0, 36.0, title);
    match &part.exponents {
        Some(exponents) if exponents.total() > 0 => {
            exponent_chart(&mut svg, exponents, part.total.entropy().unwrap_or_default());
        }
        _ => label(&mut svg, "chart", 24.0, 72.0, "No BF16 weights"),
    }
    block_chart(&mut svg, part);
    svg.push_str("</svg>\n");
    svg
}

fn exponent_chart(svg: &mut String, exponents: &Histogram, entropy: f64) {
    let total = exponents.total() as f64;
    let shares: Vec<f64> = exponents.counts().iter().map(|&count| count as f64 / total).collect();
    let common = |share: &f64| *share >= RARE;
    let first = shares.iter().position(common).unwrap_or(0);
    let last = shares.iter().rposition(common).unwrap_or(255);
    let beyond: f64 = shares[..first].iter().chain(&shares[last + 1..]).sum();
    let most = shares.iter().copied().fold(0.0, f64::max);
    let step = [0.01, 0.02, 0.05, 0.1].into_iter().find(|step| most / step <= 6.0).unwrap_or(0.2);
    let axis = Axis { top: 104.0, bottom: 320.0, max: 100.0 * (most / step).ceil() * step };

    label(svg, "chart", 24.0, 72.0, "Exponents: share of all weights");
    let note = format!(
        "entropy {entropy:.3} of 8 bits; {} of 256 values occur, {} outside this range",
        exponents.used(),
        text::percent(beyond)
    );
    label(svg, "end", RIGHT, 72.0, &note);
    axis.draw(svg, 100.0 * step, " %");
    let width = (RIGHT - LEFT) / (last - first + 1) as f64;
    for (index, &share) in shares[first..=last].iter().enumerate() {
        let exponent = first + index;
        let x = LEFT + width * index as f64;
        let tip = format!("exponent {exponent}: {:.3} %", 100.0 * share);
        bar(svg, "code", [x, axis.y(100.0 * share), width, axis.y(0.0)], &tip);
        if exponent % 4 == 0 || width > 60.0 {
            label(svg, "middle", x + width / 2.0, 338.0, &exponent.to_string());
        }
    }
    let meaning = "exponent e; a weight is ±1.m × 2^(e − 127)";
    label(svg, "middle", f64::midpoint(LEFT, RIGHT), 360.0, meaning);
}

fn block_chart(svg: &mut String, part: &Part<'_>) {
    let blocks = part.blocks.iter().map(|block| &block.total);
    let blocks: Vec<&Figures> = blocks.filter(|block| block.weights > 0).collect();
    let max = blocks.iter().filter_map(|block| block.bits_per_weight()).fold(BF16_BITS, f64::max);
    let axis = Axis { top: 440.0, bottom: 620.0, max };
    label(svg, "chart", 24.0, 408.0, "Bits per weight, by block");
    legend(svg, 408.0);
    axis.draw(svg, 4.0, "");
    let width = (RIGHT - LEFT) / blocks.len().max(1) as f64;
    // Only as many labels as fit.
    let every = blocks.len().div_ceil(LABELS).max(1);
    for (index, block) in blocks.iter().enumerate() {
        let x = LEFT + width * index as f64;
        block_bar(svg, &axis, x, width, block);
        if index % every == 0 {
            block_label(svg, x + width / 2.0, axis.bottom + 14.0, &block.name);
        }
    }
    line(svg, "limit", [LEFT, axis.y(BF16_BITS), RIGHT, axis.y(BF16_BITS)]);
}

/// A bar of the sign/mantissa bits, the other stored bits above them, and a mark at the entropy.
fn block_bar(svg: &mut String, axis: &Axis, x: f64, width: f64, block: &Figures) {
    let Some(stored) = block.bits_per_weight() else { return };
    let entropy = block.information();
    let mut tip = format!("{}: {stored:.3} bits stored", block.name);
    tip.extend(entropy.map(|entropy| format!(", {entropy:.3} of information")));
    let plane = block.kept_bits().map_or(stored, |kept| stored.min(kept));
    bar(svg, "plane", [x, axis.y(plane), width, axis.y(0.0)], &tip);
    bar(svg, "code", [x, axis.y(stored), width, axis.y(plane)], &tip);
    if let Some(entropy) = entropy {
        let gap = gap(width) / 2.0;
        line(svg, "mark", [x + gap, axis.y(entropy), x + width - gap, axis.y(entropy)]);
    }
    if width > 34.0 {
        label(svg, "middle", x + width / 2.0, axis.y(stored) - 7.0, &format!("{stored:.2}"));
    }
}

fn block_label(svg: &mut String, x: f64, y: f64, name: &str) {
    let count = name.chars().count();
    let short = if count > LABEL_CHARS {
        // Names of blocks differ at their ends.
        format!("…{}", name.chars().skip(count - LABEL_CHARS + 1).collect::<String>())
    } else {
        name.to_owned()
    };
    let _ = writeln!(
        svg,
        "<text class=\"end\" transform=\"translate({x:.1} {y:.1}) rotate(-45)\">{}</text>",
        escape(&short)
    );
}

fn legend(svg: &mut String, y: f64) {
    for (class, x, name) in
        [("plane", 440.0, "sign and mantissa"), ("code", 576.0, "exponent, as stored")]
    {
        let _ = writeln!(
            svg,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{:.1}\" width=\"12\" height=\"12\"/>",
            y - 10.0
        );
        label(svg, "", x + 18.0, y, name);
    }
    line(svg, "mark", [722.0, y - 4.0, 738.0, y - 4.0]);
    label(svg, "", 744.0, y, "entropy limit");
    line(svg, "limit", [832.0, y - 4.0, 856.0, y - 4.0]);
    label(svg, "", 862.0, y, "BF16");
}

/// Space between neighbouring bars.
fn gap(width: f64) -> f64 {
    (width / 8.0).min(4.0)
}

/// A bar between two heights, with a gap to its neighbours and a tooltip.
fn bar(svg: &mut String, class: &str, [x, top, width, bottom]: [f64; 4], tip: &str) {
    let gap = gap(width);
    let _ = writeln!(
        svg,
        "<rect class=\"{class}\" x=\"{:.2}\" y=\"{top:.2}\" width=\"{:.2}\" \
        height=\"{:.2}\"><title>{}</title></rect>",
        x + gap / 2.0,
        width - gap,
        (bottom - top).max(0.0),
        escape(tip)
    );
}

fn line(svg: &mut String, class: &str, [x1, y1, x2, y2]: [f64; 4]) {
    let _ = writeln!(
        svg,
        "<line class=\"{class}\" x1=\"{x1:.2}\" y1=\"{y1:.2}\" x2=\"{x2:.2}\" y2=\"{y2:.2}\"/>"
    );
}

fn label(svg: &mut String, class: &str, x: f64, y: f64, text: &str) {
    let _ =
        writeln!(svg, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escape(text));
}

/// Text as XML and HTML take it; characters that XML cannot hold are replaced.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() || matches!(c, '\u{FFFE}' | '\u{FFFF}') => out.push('\u{FFFD}'),
            c if is_unseen(c) => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_cannot_leave_their_element() {
        assert_eq!(
            super::escape("</text><script>\"&\u{1b}"),
            "&lt;/text&gt;&lt;script&gt;&quot;&amp;\u{FFFD}"
        );
    }
}
