//! The models of `models.txt`, which says how they are written.

use std::collections::HashMap;

/// A tensor by name and shape.
pub(crate) type Tensor = (String, Vec<u64>);

/// A model, and what its blocks must be.
#[derive(Default)]
pub(crate) struct Model {
    pub(crate) tensors: Vec<Tensor>,
    /// The digits at the end of names are their structure.
    pub(crate) is_numbered: bool,
    /// Prefix of block names, and how many blocks are counted after it.
    pub(crate) lists: Vec<(String, usize)>,
    pub(crate) others: Vec<String>,
}

pub(crate) fn models() -> Vec<Model> {
    let text = include_str!("models.txt");
    let paragraphs = text.split("\n\n").map(|paragraph| paragraph.lines().collect::<Vec<_>>());
    let (mut parts, mut models) = (HashMap::new(), Vec::new());
    for lines in paragraphs {
        if let Some(name) = lines[0].strip_prefix('%') {
            parts.insert(name, lines[1..].to_vec());
        } else if let Some(at) = lines.iter().position(|line| line.starts_with('#')) {
            models.push(model(&lines[at..], &parts));
        }
    }
    models
}

fn model(lines: &[&str], parts: &HashMap<&str, Vec<&str>>) -> Model {
    let (words, rest): (Vec<&str>, Vec<&str>) = lines.iter().partition(|line| line.contains(" = "));
    let words: Vec<_> = words.iter().map(|line| line.split_once(" = ").unwrap()).collect();
    let [heading, lists, others] = rest[0].split('|').collect::<Vec<_>>()[..] else {
        panic!("{}", rest[0])
    };
    let [lists, others] = [lists, others].map(|text| put_in(text, &words));
    let lists: Vec<&str> = lists.split_whitespace().collect();
    let list = |list: &[&str]| {
        let count = list[1].parse().unwrap();
        expand(list[0]).into_iter().map(move |name| (name, count))
    };
    let mut model = Model {
        is_numbered: heading.contains('!'),
        lists: lists.chunks(2).flat_map(list).collect(),
        others: others.split_whitespace().flat_map(expand).collect(),
        ..Model::default()
    };
    rest[1..].iter().for_each(|line| model.add(&put_in(line, &words), parts));
    model
}

/// A text with what its words mean.
fn put_in(text: &str, words: &[(impl AsRef<str>, &str)]) -> String {
    words.iter().rev().fold(text.to_owned(), |text, (word, meaning)| {
        text.replace(&format!("${}", word.as_ref()), meaning)
    })
}

impl Model {
    fn add(&mut self, line: &str, parts: &HashMap<&str, Vec<&str>>) {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap();
        if let Some(part) = first.strip_prefix('@') {
            let mut arguments: Vec<_> = (1..).map(|at: u8| at.to_string()).zip(words).collect();
            if arguments.is_empty() {
                arguments.push(("1".into(), ""));
            }
            parts[part].iter().for_each(|line| self.add(&put_in(line, &arguments), parts));
            return;
        }
        let shape: Vec<u64> = words.map(|size| size.parse().unwrap()).collect();
        for name in expand(first) {
            if let Some(stem) = name.strip_suffix("weight/bias") {
                self.tensors.push((format!("{stem}weight"), shape.clone()));
                self.tensors.push((format!("{stem}bias"), shape[..1].into()));
            } else {
                self.tensors.push((name, shape.clone()));
            }
        }
    }
}

/// The names that a pattern stands for.
fn expand(pattern: &str) -> Vec<String> {
    let Some(open) = pattern.find('{') else { return range(pattern) };
    let (mut depth, mut cuts) = (0, Vec::new());
    for (at, letter) in pattern.char_indices().skip(open) {
        depth += match letter {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        if (at, depth) == (open, 1) || letter == ',' && depth == 1 || depth == 0 {
            cuts.push(at);
        }
        if depth == 0 {
            break;
        }
    }
    let after = expand(&pattern[cuts[cuts.len() - 1] + 1..]);
    let alternatives = cuts.windows(2).flat_map(|cut| expand(&pattern[cut[0] + 1..cut[1]]));
    let whole =
        |one: String| after.iter().map(move |after| format!("{}{one}{after}", &pattern[..open]));
    alternatives.flat_map(whole).collect()
}

/// Each number of a range, or what is none.
fn range(text: &str) -> Vec<String> {
    let numbers: Vec<_> = text.split("..").map(str::parse).collect();
    match numbers[..] {
        [Ok(from), Ok(to)] => (from..to).map(|n: usize| n.to_string()).collect(),
        [Ok(from), Ok(to), Ok(step)] => {
            (from..to).step_by(step).map(|n: usize| n.to_string()).collect()
        }
        _ => vec![text.to_owned()],
    }
}
