//! What a run of the command leaves after and says next: model cards, how to load, default
//! outputs, models from the cache of the Hub, completions and manual pages.

#[path = "support/command.rs"]
mod command;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use command::{BINARY, Fixture, assert_fails, fails, good, json, names, text};
use df11::{Level, hazmat::demo};

/// A folder made of the tiny checkpoint, whose configuration says that it is a Llama.
fn llama() -> (Fixture, PathBuf) {
    let fixture = Fixture::new();
    let config = fixture.model.join("config.json");
    let text =
        fs::read_to_string(&config).unwrap().replacen('{', "{\n  \"model_type\": \"llama\",", 1);
    fs::write(config, text).unwrap();
    let out = fixture.path("tiny-df11");
    (fixture, out)
}

fn compress(fixture: &Fixture, out: &Path) -> String {
    good(&["compress", fixture.model.to_str().unwrap(), "-o", out.to_str().unwrap()])
}

#[test]
fn a_folder_gets_a_card_that_does_not_come_back() {
    let (fixture, out) = llama();
    compress(&fixture, &out);
    let card = fs::read_to_string(out.join("README.md")).unwrap();
    let stored: u64 = names(&out)
        .iter()
        .filter(|name| Path::new(name).extension().is_some_and(|end| end == "df11"))
        .map(|name| fs::metadata(out.join(name)).unwrap().len())
        .sum();
    let model = df11::open(&out).unwrap();
    for part in [
        "---\nlibrary_name: transformers\ntags:\n- df11\n",
        "# tiny-df11\n",
        &format!("| after | {stored} bytes"),
        &model.identity().to_string(),
        "transformers.AutoModelForCausalLM.from_pretrained(\"tiny-df11\"",
        "vllm serve \"tiny-df11\"",
        "df11 decompress \"tiny-df11\"",
    ] {
        assert!(card.contains(part), "{part:?} in {card}");
    }
    assert!(!card.contains("base_model"), "nothing tells which: {card}");
    assert!(model.verify(Level::Full, &()).unwrap().unchecked.is_empty());
    let back = fixture.arg("back");
    let restored = json(&["decompress", out.to_str().unwrap(), "-o", &back]);
    assert_eq!(names(Path::new(&back)), names(&fixture.model));
    assert!(restored["unchecked"].as_array().unwrap().is_empty(), "{restored}");
    // A card that nobody edited is replaced, and one that somebody did is not.
    let again =
        ["compress", fixture.model.to_str().unwrap(), "-o", out.to_str().unwrap(), "--force"];
    good(&again);
    fs::write(out.join("README.md"), format!("{card}mine\n")).unwrap();
    fails(&again, 2, &["README.md", "not part of an earlier output"]);
    let restored = json(&["decompress", out.to_str().unwrap(), "-o", &fixture.arg("back-2")]);
    assert_eq!(restored["unchecked"], serde_json::json!(["README.md"]));
}

#[test]
fn a_card_of_the_models_own_is_carried() {
    let (fixture, out) = llama();
    fs::write(fixture.model.join("README.md"), "mine\n").unwrap();
    compress(&fixture, &out);
    assert_eq!(fs::read(out.join("README.md")).unwrap(), b"mine\n");
    let card = fs::read_to_string(out.join("DF11.md")).unwrap();
    assert!(card.starts_with("# tiny-df11\n") && card.contains("from_pretrained"), "{card}");
    let back = fixture.arg("back");
    good(&["decompress", out.to_str().unwrap(), "-o", &back]);
    assert_eq!(names(Path::new(&back)), names(&fixture.model));
    // A conversion writes its own.
    let converted = fixture.arg("gap");
    good(&["convert", out.to_str().unwrap(), &converted, "--layout", "gap"]);
    assert!(fs::read_to_string(Path::new(&converted).join("DF11.md")).unwrap().contains("# gap\n"));
    let plain = fixture.arg("plain");
    good(&["compress", fixture.model.to_str().unwrap(), "-o", &plain, "--no-card"]);
    assert!(!Path::new(&plain).join("DF11.md").exists());
}

#[test]
fn the_end_says_how_to_load() {
    let (fixture, out) = llama();
    let said = compress(&fixture, &out);
    let line = format!(
        "model = transformers.AutoModelForCausalLM.from_pretrained({out:?}, device_map=\"auto\")"
    );
    assert_eq!(said.lines().last().unwrap().trim(), line);
    let file = fixture.arg("one.df11");
    let said = good(&["compress", fixture.model.to_str().unwrap(), "-o", &file]);
    assert!(said.contains(&format!("df11.attach(module, {file:?})")), "{said}");
    assert!(said.lines().last().unwrap().contains("df11 convert"), "{said}");
    // Without a config there is no folder for them.
    let weights = fixture.model.join("model-00001-of-00002.safetensors");
    let alone = good(&["compress", weights.to_str().unwrap(), "-o", &fixture.arg("alone.df11")]);
    assert!(alone.contains("df11.attach") && !alone.contains("df11 convert"), "{alone}");
    let report = json(&["convert", &file, &fixture.arg("folder")]);
    assert!(report["load"].as_str().unwrap().contains("from_pretrained"), "{report}");
}

#[test]
fn decompress_has_a_default_output() {
    let fixture = Fixture::new();
    let folder = fixture.arg("tiny-df11");
    json(&["compress", fixture.model.to_str().unwrap(), "-o", &folder]);
    fails(&["decompress", fixture.container.to_str().unwrap()], 2, &["model exists", "--force"]);
    assert_eq!(json(&["decompress", &folder])["output"], fixture.arg("tiny"));
    assert_eq!(names(&fixture.path("tiny")), names(&fixture.model));
    // One file comes back as one.
    let first = fixture.model.join("model-00001-of-00002.safetensors");
    let single = fixture.arg("first.df11");
    json(&["compress", first.to_str().unwrap(), "-o", &single]);
    json(&["decompress", &single]);
    assert!(fs::read(fixture.path("first.safetensors")).unwrap() == fs::read(first).unwrap());
    fs::rename(&folder, fixture.path("other")).unwrap();
    fails(&["decompress", &fixture.arg("other")], 2, &["tells no name", "-o"]);
}

/// A cache of the Hub with the tiny checkpoint in it.
struct Cache {
    fixture: Fixture,
}

impl Cache {
    fn new() -> Self {
        let fixture = Fixture::new();
        let entry = fixture.path("home/hub/models--tiny--llama-1.5");
        fs::create_dir_all(entry.join("blobs")).unwrap();
        fs::create_dir_all(entry.join("snapshots")).unwrap();
        fs::create_dir_all(entry.join("refs/pr")).unwrap();
        let other = fixture.path("other");
        fs::create_dir(&other).unwrap();
        fs::rename(&fixture.model, entry.join("snapshots/0123")).unwrap();
        fs::rename(demo::checkpoint(&other, demo::TINY, 5).unwrap(), entry.join("snapshots/4567"))
            .unwrap();
        fs::write(entry.join("refs/main"), "0123").unwrap();
        fs::write(entry.join("refs/pr/1"), "4567").unwrap();
        fs::create_dir(fixture.path("here")).unwrap();
        Self { fixture }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(BINARY);
        command.args(arguments).current_dir(self.fixture.path("here"));
        command.env_remove("HF_HUB_CACHE").env_remove("HUGGINGFACE_HUB_CACHE");
        command.env("HF_HOME", self.fixture.path("home")).output().unwrap()
    }
}

#[test]
fn a_repository_is_found_in_the_cache_of_the_hub() {
    let cache = Cache::new();
    let output = cache.run(&["compress", "tiny/llama-1.5", "--json"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(names(&cache.fixture.path("here")), ["llama-1.5.df11"]);
    let model = df11::open(cache.fixture.path("here/llama-1.5.df11")).unwrap();
    assert_eq!(model.identity(), df11::open(&cache.fixture.container).unwrap().identity());

    let output = cache.run(&["compress", "tiny/llama-1.5@pr/1", "-o", "out"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let card = fs::read_to_string(cache.fixture.path("here/out/README.md")).unwrap();
    assert!(card.contains("\nbase_model: tiny/llama-1.5\n"), "{card}");
    assert_ne!(df11::open(cache.fixture.path("here/out")).unwrap().identity(), model.identity());
    assert!(cache.run(&["estimate", "tiny/llama-1.5@4567"]).status.success());

    for (name, command) in [
        ("tiny/other", "hf download tiny/other"),
        ("tiny/llama-1.5@v2", "hf download tiny/llama-1.5 --revision v2"),
    ] {
        assert_fails(&cache.run(&["compress", name]), 2, &[command]);
    }
    // A path that is wrong is no repository.
    assert_fails(&cache.run(&["compress", "../here/x"]), 2, &["check the path"]);
    assert_fails(&cache.run(&["compress", "nowhere"]), 2, &["check the path"]);
}

#[test]
fn info_is_inspect() {
    let fixture = Fixture::new();
    let container = fixture.container.to_str().unwrap();
    assert_eq!(good(&["info", container]), good(&["inspect", container]));
}

#[test]
fn units_are_what_they_say() {
    let fixture = Fixture::new();
    let memory = |size: &str| {
        let report = json(&["estimate", fixture.container.to_str().unwrap(), "--gpus", size]);
        report["placement"]["gpus"][0]["memory_bytes"].as_u64().unwrap()
    };
    assert_eq!((memory("80GB"), memory("80GiB")), (80_000_000_000, 80 << 30));
}

/// Runs a script with a shell, if the machine has it; says so if it has not. With
/// `DF11_REQUIRE_SHELLS` set that is a failure.
fn shell(name: &str, script: &str) -> Option<String> {
    let Ok(output) = Command::new(name).args(["-c", script]).output() else {
        assert!(std::env::var_os("DF11_REQUIRE_SHELLS").is_none(), "there is no {name}");
        eprintln!("skipped: there is no {name}");
        return None;
    };
    assert!(output.status.success(), "{name}: {}", text(&output.stderr));
    Some(text(&output.stdout).to_owned())
}

#[test]
fn shells_load_the_completions() {
    let folder = tempfile::tempdir().unwrap();
    let file = |shell: &str| {
        let path = folder.path().join(format!("_df11.{shell}"));
        fs::write(&path, good(&["completions", shell])).unwrap();
        path.into_os_string().into_string().unwrap()
    };
    let script = format!(
        "source {}; COMP_WORDS=(df11 decom); COMP_CWORD=1; _df11 df11 decom df11; echo \
        ${{COMPREPLY[@]}}",
        file("bash")
    );
    if let Some(said) = shell("bash", &script) {
        assert_eq!(said.trim(), "decompress");
    }
    let zsh = file("zsh");
    if let Some(said) =
        shell("zsh", &format!("autoload -U compinit; compinit -D; source {zsh}; whence -w _df11"))
    {
        assert!(said.contains("function"), "{said}");
    }
    let fish = file("fish");
    if let Some(said) = shell("fish", &format!("source {fish}; complete -C 'df11 decom'")) {
        assert!(said.contains("decompress"), "{said}");
    }
    fails_usage(&["completions", "csh"]);
}

fn fails_usage(arguments: &[&str]) {
    let output = command::df11(arguments);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
}

#[test]
fn there_is_a_manual_page() {
    let page = good(&["man"]);
    assert!(page.contains(".TH df11 1") && page.contains("compress"), "{page}");
    assert!(good(&["man", "compress"]).contains("no\\-verify"));
    fails(&["man", "nothing"], 2, &["no verb"]);
}
