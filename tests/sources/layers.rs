//! Imports keep to the table of ARCHITECTURE.md: the imports of `src/` are compared with its column
//! "may use". And no file imports itself through others.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use crate::files::files;

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

/// The trees of all `use` declarations; with `exports`, of those that make names public alone.
fn uses(code: &str, exports: bool) -> Vec<String> {
    let lines: Vec<&str> = code.lines().collect();
    let starts = lines.iter().map(|line| line.trim_start()).enumerate().filter(|(_, line)| {
        let public = line.starts_with("pub") && line.contains(" use ");
        public || !exports && line.starts_with("use ")
    });
    starts
        .map(|(at, _)| {
            let text = lines[at..].join(" ");
            let tree = text.split_once("use ").unwrap().1.split_once(';').unwrap().0;
            tree.split_whitespace().collect::<Vec<_>>().join(" ")
        })
        .collect()
}

/// Paths in the code that start with `crate` or `super`, except in braces after it.
fn inline(code: &str) -> Vec<String> {
    let of = |start: &str| {
        let rests = code.split(start).skip(1).map(|rest| {
            let end = rest.find(|char: char| !char.is_alphanumeric() && !"_:".contains(char));
            &rest[..end.unwrap_or(rest.len())]
        });
        let named = rests.filter(|rest| !rest.is_empty());
        named.map(|rest| format!("{start}{rest}")).collect::<Vec<_>>()
    };
    [of("crate::"), of("super::")].concat()
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
    let (layers, modules) = (layers(), modules());
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for (module, used) in imports(&modules) {
        let Some(Some(allowed)) = layers.get(top(module)) else { continue };
        seen += used.len();
        let over = used.into_iter().filter(|used| !allowed.contains(top(used)));
        wrong.extend(over.map(|used| format!("{module} uses {used}")));
    }
    assert!(seen > 300, "{seen} uses were found");
    assert!(wrong.is_empty(), "against ARCHITECTURE.md:\n{}", wrong.join("\n"));
}

/// The command uses the library by its name, as others do.
#[test]
fn the_command_uses_the_library_as_others_do() {
    for (module, used) in imports(&modules()).iter().filter(|(module, _)| top(module) == "cli") {
        assert!(used.iter().all(|used| top(used) == "cli"), "{module} uses {used:?}");
    }
}

/// The module of the crate's root that a module is in.
fn top(module: &str) -> &str {
    module.split("::").next().unwrap()
}

/// The modules of `src/` by their paths, such as `gpu::linear`, each with its code; the root's path
/// is empty.
fn modules() -> BTreeMap<String, String> {
    let src = root().join("src");
    let of = |name: String| {
        let path = name.strip_suffix(".rs")?.replace('/', "::");
        let path = path.strip_suffix("::mod").unwrap_or(&path);
        let path = if path == "lib" { "" } else { path };
        (path != "main").then(|| (path.to_owned(), code(&src.join(name))))
    };
    files(&src).into_keys().filter_map(of).collect()
}

/// The path of a name that a module writes as `path`, if it is one of the crate.
fn absolute(module: &str, path: &str, modules: &BTreeMap<String, String>) -> Option<String> {
    let (mut module, mut path) = (module, path);
    if let Some(path) = path.strip_prefix("crate::") {
        return Some(path.to_owned());
    }
    let own = format!("{module}::{}", top(path));
    let own = own.trim_start_matches("::");
    let relative = path.starts_with("super::") || modules.contains_key(own);
    while let Some(rest) = path.strip_prefix("super::") {
        (module, path) = (module.rsplit_once("::").map_or("", |(parent, _)| parent), rest);
    }
    relative.then(|| format!("{module}::{path}").trim_start_matches("::").to_owned())
}

/// The module that a path is in: the longest one that it starts with.
fn home<'a>(path: &str, modules: &'a BTreeMap<String, String>) -> Option<&'a str> {
    let starts = |module: &str| {
        path.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    };
    modules
        .keys()
        .map(String::as_str)
        .filter(|module| starts(module))
        .max_by_key(|module| module.len())
}

/// For each module, those that define what it imports.
fn imports(modules: &BTreeMap<String, String>) -> BTreeMap<&str, BTreeSet<&str>> {
    let found = |module: &str, code: &str, exports: bool| -> Vec<String> {
        let trees = uses(code, exports).into_iter().flat_map(|tree| paths(&tree));
        let named = if exports { Vec::new() } else { inline(code) };
        trees.chain(named).filter_map(|path| absolute(module, &path, modules)).collect()
    };
    let exports: BTreeMap<String, String> = modules
        .iter()
        .flat_map(|(module, code)| {
            let name = move |path: &str| format!("{module}::{}", path.rsplit("::").next().unwrap());
            let exports = found(module, code, true).into_iter();
            exports.map(move |path| (name(&path).trim_start_matches("::").to_owned(), path))
        })
        .collect();
    let defining = |mut path: String| {
        while let Some(next) = exports.get(&path).filter(|next| **next != path) {
            path.clone_from(next);
        }
        home(&path, modules)
    };
    modules
        .iter()
        .map(|(module, code)| {
            let exported = found(module, code, true);
            let used =
                found(module, code, false).into_iter().filter(|path| !exported.contains(path));
            (module.as_str(), used.filter_map(defining).filter(|home| home != module).collect())
        })
        .collect()
}

/// The modules that a module imports, directly or through others.
fn reached<'a>(imports: &BTreeMap<&'a str, BTreeSet<&'a str>>, from: &'a str) -> BTreeSet<&'a str> {
    let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(module) = next.pop() {
        next.extend(imports[module].iter().filter(|used| seen.insert(**used)));
    }
    seen
}

#[test]
fn no_file_imports_itself_through_others() {
    let modules = modules();
    let imports = imports(&modules);
    assert!(imports.values().map(BTreeSet::len).sum::<usize>() > 500, "{imports:?}");
    let back = |module: &str| {
        let leads = |used: &&&str| reached(&imports, used).contains(module);
        imports[module].iter().filter(leads).copied().collect::<Vec<_>>().join(", ")
    };
    let circles = imports.keys().map(|module| (*module, back(module)));
    let circles = circles.filter(|(_, used)| !used.is_empty());
    let lines: Vec<String> =
        circles.map(|(module, used)| format!("{module} uses {used}")).collect();
    assert!(lines.is_empty(), "these import each other in a circle:\n{}", lines.join("\n"));
}

/// The names of the types and traits that a module defines.
fn types(code: &str) -> impl Iterator<Item = &str> {
    code.lines().filter_map(|line| {
        let mut words =
            line.trim_start().split([' ', '<', '(', ';', '{', ':']).skip_while(|word| {
                word.starts_with("pub") || ["crate)", "super)", "unsafe"].contains(word)
            });
        let kind = words.next()?;
        ["struct", "enum", "trait", "union"].contains(&kind).then(|| words.next())?
    })
}

#[test]
fn no_two_types_share_a_name() {
    let modules = modules();
    let mut homes: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (module, code) in &modules {
        types(code).for_each(|name| _ = homes.entry(name).or_default().insert(module));
    }
    assert!(homes.len() > 250, "{} types were found", homes.len());
    // Encodings may share names of types: each has a folder, which tells them apart.
    let encodings = |homes: &BTreeSet<&str>| {
        let folder = |home: &&str| home.split("::").take(2).collect::<Vec<_>>().join("::");
        let folders: BTreeSet<String> = homes.iter().map(folder).collect();
        folders.len() == homes.len() && folders.iter().all(|name| name.starts_with("encoding::"))
    };
    let shared = homes.iter().filter(|(_, homes)| homes.len() > 1 && !encodings(homes));
    let lines: Vec<String> = shared.map(|(name, homes)| format!("{name}: {homes:?}")).collect();
    assert!(lines.is_empty(), "these modules define types of one name:\n{}", lines.join("\n"));
}
