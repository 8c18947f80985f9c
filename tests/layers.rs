//! Imports point up the table of ARCHITECTURE.md: what `src/` imports, held against its column "may
//! use".

#[path = "support/files.rs"]
mod files;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use files::files;

/// For each module, those that it may use; `None` for all of the public API.
type Layers = BTreeMap<String, Option<BTreeSet<String>>>;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The modules of a cell: `[error](src/error.rs), [dtype](src/dtype.rs)`, of those in `src/`.
fn modules_of(cell: &str) -> Vec<String> {
    let links = cell.split('[').skip(1).filter_map(|link| link.split_once("](src/"));
    links.map(|(name, _)| name.to_owned()).collect()
}

/// Whether a sentence has a word.
fn has(sentence: &str, word: &str) -> bool {
    sentence.split(|char: char| !char.is_ascii_alphanumeric()).any(|found| found == word)
}

/// Reads the table.
fn layers() -> Layers {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let mut layers = Layers::new();
    let mut above: BTreeSet<String> = BTreeSet::new();
    let mut ground = BTreeSet::new();
    let rows = text.lines().skip_while(|line| !line.starts_with("| module | what it does"));
    for row in rows.skip(2).take_while(|row| row.starts_with('|')) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [names, _, may_use] = cells[..] else { panic!("three columns: {row}") };
        let names = modules_of(names);
        let own: BTreeSet<String> = names.iter().cloned().collect();
        if ground.is_empty() {
            ground.clone_from(&own);
        }
        let mut allowed = own.clone();
        if has(may_use, "other") || has(may_use, "ground") {
            allowed.extend(ground.iter().cloned());
        }
        allowed.extend(
            above
                .iter()
                .filter(|name| may_use.contains("all above") || has(may_use, name))
                .cloned(),
        );
        let allowed = (!may_use.contains("public API")).then_some(allowed);
        layers.extend(names.into_iter().map(|name| (name, allowed.clone())));
        above.extend(own);
    }
    layers
}

/// The paths of a use tree: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn paths(tree: &str) -> Vec<String> {
    let (mut depth, mut parts) = (0, vec![String::new()]);
    for char in tree.chars() {
        depth += i32::from(char == '{') - i32::from(char == '}');
        match char {
            ',' if depth == 0 => parts.push(String::new()),
            char => parts.last_mut().unwrap().push(char),
        }
    }
    let parts = parts.iter().map(|part| part.trim()).filter(|part| !part.is_empty());
    let of = |part: &str| match part.split_once('{') {
        None => vec![part.split(" as ").next().unwrap().trim().to_owned()],
        Some((before, inner)) => {
            let inner = inner.trim().strip_suffix('}').unwrap();
            paths(inner).into_iter().map(|path| format!("{before}{path}")).collect()
        }
    };
    parts.flat_map(of).collect()
}

/// The code of a file without comments and tests.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    text.split("\nmod tests {")
        .next()
        .unwrap()
        .lines()
        .map(|line| line.split("//").next().unwrap())
        .collect::<Vec<_>>()
        .join("\n")
}

/// The trees of all `use` declarations.
fn uses(code: &str) -> Vec<String> {
    let starts = code.lines().enumerate().filter(|(_, line)| {
        let line = line.trim_start();
        line.starts_with("use ")
            || line.starts_with("pub use ")
            || line.starts_with("pub(crate) use ")
    });
    let lines: Vec<&str> = code.lines().collect();
    starts
        .map(|(at, _)| {
            let text = lines[at..].join(" ");
            let tree = text.split_once("use ").unwrap().1.split_once(';').unwrap().0;
            tree.split_whitespace().collect::<Vec<_>>().join(" ")
        })
        .collect()
}

/// The module in which each name of the crate's root is defined.
fn root_names() -> BTreeMap<String, String> {
    let trees = uses(&code(&root().join("src/lib.rs")));
    let names = trees.iter().flat_map(|tree| paths(tree)).filter_map(|path| {
        let (module, _) = path.split_once("::")?;
        Some((path.rsplit("::").next().unwrap().to_owned(), module.to_owned()))
    });
    names.collect()
}

/// Modules of the crate that a file names, in `use` declarations and in paths.
fn named(path: &Path, names: &BTreeMap<String, String>, layers: &Layers) -> BTreeSet<String> {
    let code = code(path);
    let imports = uses(&code).into_iter().flat_map(|tree| paths(&tree));
    let inline = code.split("crate::").skip(1).map(|rest| {
        let end =
            rest.find(|char: char| !char.is_ascii_alphanumeric() && char != '_' && char != ':');
        format!("crate::{}", &rest[..end.unwrap_or(rest.len())])
    });
    let paths: Vec<String> = imports.chain(inline).collect();
    let first = paths.iter().filter_map(|path| path.strip_prefix("crate::")?.split("::").next());
    first
        .filter_map(|name| match names.get(name) {
            _ if layers.contains_key(name) => Some(name.to_owned()),
            Some(module) => Some(module.clone()),
            None => None,
        })
        .collect()
}

/// The files in a folder of `src/`, or in all of it.
fn sources(folder: &str) -> Vec<PathBuf> {
    let src = root().join("src").join(folder);
    let mut paths: Vec<PathBuf> = files(&src).into_keys().map(|name| src.join(name)).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    paths
}

#[test]
fn every_module_has_a_row() {
    let layers = layers();
    let code = code(&root().join("src/lib.rs"));
    let modules = code.lines().filter_map(|line| {
        let line = line.trim_start_matches("pub ");
        line.strip_prefix("mod ")?.strip_suffix(';')
    });
    // `hazmat` names what others define.
    let missing: Vec<&str> =
        modules.filter(|&name| name != "hazmat" && !layers.contains_key(name)).collect();
    assert!(missing.is_empty(), "ARCHITECTURE.md has no row for {missing:?}");
    assert!(layers.len() > 10, "{:?}", layers.keys());
}

#[test]
fn imports_point_up_the_table() {
    let (layers, names, src) = (layers(), root_names(), root().join("src"));
    assert_eq!(names.get("Model").map(String::as_str), Some("open"), "{names:?}");
    let mut wrong = Vec::new();
    let mut seen = 0;
    for path in &sources("") {
        let relative = path.strip_prefix(&src).unwrap();
        let module = relative.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
        let Some(Some(allowed)) = layers.get(module) else { continue };
        let used = named(path, &names, &layers);
        seen += used.len();
        let over = used.into_iter().filter(|used| !allowed.contains(used));
        wrong.extend(over.map(|used| format!("{} uses {used}", relative.display())));
    }
    assert!(seen > 300, "{seen} uses were found");
    assert!(wrong.is_empty(), "against ARCHITECTURE.md:\n{}", wrong.join("\n"));
}

/// Of the command: it uses the library by its name, as others do.
#[test]
fn the_command_uses_the_library_as_others_do() {
    let (layers, names) = (layers(), root_names());
    for path in sources("cli") {
        let used = named(&path, &names, &layers);
        assert!(used.iter().all(|used| used == "cli"), "{} uses {used:?}", path.display());
    }
}
