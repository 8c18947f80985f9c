//! The programs of docs/rust.md: each compiles as typed, as the only code of a new project.

use std::{fs, path::Path, process::Command};

use df11::{CompressOptions, hazmat::demo};

/// Runs a line of shell in a folder, without the network, and with this build's compiler.
fn run(folder: &Path, target: &Path, line: &str) -> String {
    let mut command = Command::new("sh");
    command.args(["-e", "-c", line]).current_dir(folder);
    command.env("CARGO_NET_OFFLINE", "true").env("CARGO_TARGET_DIR", target);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn programs_of_the_documentation_compile_in_an_empty_project() {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(checkout.join("docs/rust.md")).unwrap();
    let blocks = |fence: &str| -> Vec<String> {
        let fence = format!("```{fence}\n");
        let pieces = page.split(&fence).skip(1);
        pieces.map(|piece| piece.split_once("```").unwrap().0.to_owned()).collect()
    };
    let place = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(checkout, place.path().join("df11")).unwrap();
    // In the same target folder, so that dependencies are compiled once.
    let tests = std::env::current_exe().unwrap();
    let target = tests.parent().unwrap().with_file_name("docs");
    let commands = blocks("sh");
    run(place.path(), &target, &commands[0]);
    let project = place.path().join("reader");
    fs::copy(checkout.join("Cargo.lock"), project.join("Cargo.lock")).unwrap();

    let checkpoint = demo::tiny_checkpoint(place.path()).unwrap();
    let source = df11::Source::open(&checkpoint).unwrap();
    let container = project.join("Llama-3.1-8B.df11");
    df11::compress(&source, &container, &CompressOptions::new(), &()).unwrap();
    let programs = blocks("rust,no_run");
    assert_eq!(programs.len(), 2, "one for the CPU, and one for a GPU");
    for (program, verb) in programs.iter().zip(["run", "build"]) {
        fs::write(project.join("src/main.rs"), program).unwrap();
        let said = run(&project, &target, &format!("RUSTFLAGS=-Dwarnings cargo {verb}"));
        assert!(verb == "build" || said.contains("model.embed_tokens.weight: "), "{said}");
    }
}
