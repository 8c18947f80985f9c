//! Names as sequences of components, in their natural order.

use std::cmp::Ordering;

/// How many components of a name are told apart; the last one takes all that follows.
pub(super) const MAX_DEPTH: usize = 32;

/// The components of a name: one at least, [`MAX_DEPTH`] at most.
pub(super) fn components(name: &str) -> impl Iterator<Item = &str> {
    name.splitn(MAX_DEPTH, '.')
}

/// The natural order of names: component by component, numbers by value.
pub(super) fn compare(left: &str, right: &str) -> Ordering {
    let (mut lefts, mut rights) = (components(left), components(right));
    loop {
        match (lefts.next(), rights.next()) {
            (Some(left), Some(right)) => match compare_components(left, right) {
                Ordering::Equal => {}
                order => return order,
            },
            (left, right) => return left.is_some().cmp(&right.is_some()),
        }
    }
}

/// Runs of digits compare by value; components that are equal in this sense (`01`, `1`) by their
/// bytes, so that only equal components compare as equal.
fn compare_components(left: &str, right: &str) -> Ordering {
    let (mut l, mut r) = (left.as_bytes(), right.as_bytes());
    loop {
        let order = match (l.first(), r.first()) {
            (Some(a), Some(b)) if a.is_ascii_digit() && b.is_ascii_digit() => {
                compare_numbers(take_digits(&mut l), take_digits(&mut r))
            }
            (Some(a), Some(b)) => {
                (l, r) = (&l[1..], &r[1..]);
                a.cmp(b)
            }
            (a, b) => return a.is_some().cmp(&b.is_some()).then_with(|| left.cmp(right)),
        };
        if order != Ordering::Equal {
            return order;
        }
    }
}

fn take_digits<'a>(bytes: &mut &'a [u8]) -> &'a [u8] {
    let count = bytes.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let (digits, rest) = bytes.split_at(count);
    *bytes = rest;
    digits
}

/// By value, of any length.
fn compare_numbers(left: &[u8], right: &[u8]) -> Ordering {
    let significant = |digits: &[u8]| digits.iter().take_while(|&&digit| digit == b'0').count();
    let (left, right) = (&left[significant(left)..], &right[significant(right)..]);
    left.len().cmp(&right.len()).then_with(|| left.cmp(right))
}

/// Whether a component is an index.
pub(super) fn is_number(component: &str) -> bool {
    !component.is_empty() && component.bytes().all(|byte| byte.is_ascii_digit())
}

/// What stands before the number at the end of a component, where there are both.
pub(super) fn stem(component: &str) -> Option<&str> {
    let stem = component.trim_end_matches(|c: char| c.is_ascii_digit());
    (!stem.is_empty() && stem.len() < component.len()).then_some(stem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_compare_by_value() {
        let long = format!("a.{}", "9".repeat(4000));
        let names = [
            "", ".", "..", "0", "00", "1", "2.x", "10", "a", "a.2", "a.b", "a2", "a2.b", "a10",
            "a10b", "b",
        ];
        for (i, left) in names.iter().enumerate() {
            for (j, right) in names.iter().enumerate() {
                assert_eq!(compare(left, right), i.cmp(&j), "{left:?} {right:?}");
            }
        }
        assert_eq!(compare(&long, "a.18446744073709551616"), Ordering::Greater);
    }

    #[test]
    fn stems_end_before_the_number() {
        assert_eq!(stem("layer12"), Some("layer"));
        assert_eq!(stem("encoder_layer_0"), Some("encoder_layer_"));
        for component in ["12", "layer", "conv1d", ""] {
            assert_eq!(stem(component), None, "{component}");
        }
        assert!(is_number("007") && !is_number("") && !is_number("1a") && !is_number("٣"));
    }
}
