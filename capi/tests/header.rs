//! The committed header is what the code says.

use std::{fs, path::Path};

#[test]
fn header_is_of_this_code() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let files = ["version", "error", "model", "device", "gpu"]
        .map(|name| folder.join(format!("src/{name}.rs")));
    let sources = files.into_iter().fold(cbindgen::Builder::new(), cbindgen::Builder::with_src);
    let mut made = Vec::new();
    sources.with_config(config).generate().unwrap().write(&mut made);
    let made = String::from_utf8(made).unwrap();
    let path = folder.join("include/df11.h");
    if std::env::var_os("DF11_WRITE_HEADER").is_some() {
        fs::write(&path, &made).unwrap();
    }
    let is_function = |line: &&str| {
        !line.trim_start().starts_with("//") && line.contains("df11_") && line.contains('(')
    };
    assert_eq!(made.lines().filter(is_function).count(), 16, "an interface that stays small");
    let message = "renew it: DF11_WRITE_HEADER=1 cargo test -p df11-capi --test header";
    assert_eq!(fs::read_to_string(path).unwrap(), made, "{message}");
}
