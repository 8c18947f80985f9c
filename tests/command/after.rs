//! The command's last words and files: model cards, code that loads, default outputs, models from
//! the cache of the Hub, completions and manual pages.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use df11::{Level, hazmat::demo};

use crate::command::{Fixture, Folder, assert_fails, names, text};

/// A folder with the tiny checkpoint, whose configuration says that it is a Llama.
fn llama() -> Fixture {
    let fixture = Fixture::new();
    let config = String::from_utf8(fixture.read("model/config.json")).unwrap();
    fixture.write("model/config.json", config.replacen('{', "{\n  \"model_type\": \"llama\",", 1));
    fixture
}

#[test]
fn a_folder_gets_a_card_that_does_not_come_back() {
    let fixture = llama();
    fixture.good("compress model -o tiny-df11");
    let out = fixture.path("tiny-df11");
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
    let restored = fixture.json("decompress tiny-df11 -o back");
    assert_eq!(names(&fixture.path("back")), names(&fixture.model));
    assert!(restored["unchecked"].as_array().unwrap().is_empty(), "{restored}");
    // A card that nobody edited is replaced, and one that somebody did is not.
    let again = "compress model -o tiny-df11 --force";
    fixture.good(again);
    fixture.write("tiny-df11/README.md", format!("{card}mine\n"));
    fixture.fails(again, 2, &["README.md", "not part of an earlier output"]);
    let restored = fixture.json("decompress tiny-df11 -o back-2");
    assert_eq!(restored["unchecked"], serde_json::json!(["README.md"]));
}

#[test]
fn a_card_of_the_models_own_is_carried() {
    let fixture = llama();
    fixture.write("model/README.md", "mine\n");
    fixture.good("compress model -o tiny-df11");
    assert_eq!(fixture.read("tiny-df11/README.md"), b"mine\n");
    let card = |folder: &str| fs::read_to_string(fixture.path(folder).join("DF11.md"));
    let own = card("tiny-df11").unwrap();
    assert!(own.starts_with("# tiny-df11\n") && own.contains("from_pretrained"), "{own}");
    fixture.good("decompress tiny-df11 -o back");
    assert_eq!(names(&fixture.path("back")), names(&fixture.model));
    // A conversion writes its own.
    fixture.good("convert tiny-df11 -o gap --layout gap");
    assert!(card("gap").unwrap().contains("# gap\n"));
    fixture.good("compress model -o plain --no-card");
    assert!(card("plain").is_err());
}

#[test]
fn the_end_says_how_to_load() {
    let fixture = llama();
    let said = fixture.good("compress model -o tiny-df11");
    let line = "model = transformers.AutoModelForCausalLM.from_pretrained(\"tiny-df11\", \
                device_map=\"auto\")";
    assert_eq!(said.lines().last().unwrap().trim(), line);
    let said = fixture.good("compress model -o one.df11");
    assert!(said.contains("df11.attach(module, \"one.df11\")"), "{said}");
    assert!(said.lines().last().unwrap().contains("df11 convert"), "{said}");
    // Without a config there is no folder for them.
    let weights = "model/model-00001-of-00002.safetensors";
    let alone = fixture.good(&format!("compress {weights} -o alone.df11"));
    assert!(alone.contains("df11.attach") && !alone.contains("df11 convert"), "{alone}");
    let report = fixture.json("convert one.df11 -o folder");
    assert!(report["load"].as_str().unwrap().contains("from_pretrained"), "{report}");
}

#[test]
fn decompress_has_a_default_output() {
    let fixture = Fixture::new();
    fixture.json("compress model -o tiny-df11");
    fixture.fails("decompress model.df11", 2, &["model exists", "--force"]);
    let report = fixture.json(&format!("decompress {}", fixture.arg("tiny-df11")));
    assert_eq!(report["output"], fixture.arg("tiny"));
    assert_eq!(names(&fixture.path("tiny")), names(&fixture.model));
    // One file comes back as one.
    let first = "model/model-00001-of-00002.safetensors";
    fixture.json(&format!("compress {first} -o first.df11"));
    fixture.json("decompress first.df11");
    assert!(fixture.read("first.safetensors") == fixture.read(first));
    fs::rename(fixture.path("tiny-df11"), fixture.path("other")).unwrap();
    fixture.fails("decompress other", 2, &["gives no name", "-o"]);
}

/// A fixture with a cache of the Hub in `home`, of which the command knows, and an empty folder
/// `here`, where it runs. The cache has the tiny checkpoint.
struct Cache(Fixture);

impl Cache {
    fn new() -> Self {
        let fixture = Fixture::new();
        let entry = fixture.path("home/hub/models--tiny--llama-1.5");
        for folder in [entry.join("blobs"), entry.join("snapshots"), fixture.path("here")] {
            fs::create_dir_all(folder).unwrap();
        }
        fs::rename(&fixture.model, entry.join("snapshots/0123")).unwrap();
        let other = demo::checkpoint(fixture.root(), demo::TINY, 5).unwrap();
        fs::rename(other, entry.join("snapshots/4567")).unwrap();
        fixture.write("home/hub/models--tiny--llama-1.5/refs/main", "0123");
        fixture.write("home/hub/models--tiny--llama-1.5/refs/pr/1", "4567");
        Self(fixture)
    }

    fn run(&self, line: &str) -> Output {
        let mut command = self.0.command(line);
        command.current_dir(self.0.path("here"));
        command.env_remove("HF_HUB_CACHE").env_remove("HUGGINGFACE_HUB_CACHE");
        command.env("HF_HOME", self.0.path("home")).output().unwrap()
    }
}

#[test]
fn a_repository_is_found_in_the_cache_of_the_hub() {
    let cache = Cache::new();
    let identity = |path: &str| df11::open(cache.0.path(path)).unwrap().identity();
    let output = cache.run("compress tiny/llama-1.5 --json");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(names(&cache.0.path("here")), ["llama-1.5-df11"]);
    assert_eq!(identity("here/llama-1.5-df11"), identity("model.df11"));

    let output = cache.run("compress tiny/llama-1.5@pr/1 -o out");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let card = fs::read_to_string(cache.0.path("here/out/README.md")).unwrap();
    assert!(card.contains("\nbase_model: tiny/llama-1.5\n"), "{card}");
    assert_ne!(identity("here/out"), identity("model.df11"));
    assert!(cache.run("estimate tiny/llama-1.5@4567").status.success());

    for (name, remedy) in [
        ("tiny/other", "hf download tiny/other"),
        ("tiny/llama-1.5@v2", "hf download tiny/llama-1.5 --revision v2"),
        // A path that is wrong is no repository.
        ("../here/x", "check the path"),
        ("nowhere", "check the path"),
    ] {
        assert_fails(&cache.run(&format!("compress {name}")), 2, &[remedy]);
    }
}

#[test]
fn a_revision_leads_nowhere_but_into_its_repository() {
    let cache = Cache::new();
    let entry = "home/hub/models--tiny--llama-1.5";
    fs::rename(cache.0.path(entry).join("snapshots/4567"), cache.0.path("evil")).unwrap();
    let evil = cache.0.arg("evil");
    cache.0.write("evil/main", "0123");
    for revision in [&evil, "../../../../evil", "../snapshots/0123", "a/../../x", "..", ".", "a//b"]
    {
        // Windows goes up from a folder that is not there, so this is the path of a folder.
        if cfg!(windows) && revision == "../../../../evil" {
            continue;
        }
        let output = cache.run(&format!("compress tiny/llama-1.5@{revision} -o out"));
        assert_fails(&output, 2, &["is not a revision of a repository", "a branch"]);
    }
    let output = cache.run(&format!("compress tiny/llama-1.5@{evil}/main -o out"));
    assert_fails(&output, 2, &["is not a revision of a repository"]);
    for commit in [&evil, "../../../../evil", "..", "", "0123/../0123"] {
        cache.0.write(&format!("{entry}/refs/v2"), commit);
        let output = cache.run("compress tiny/llama-1.5@v2 -o out");
        assert_fails(&output, 2, &["another revision", "hf download"]);
    }
}

#[test]
fn info_is_inspect() {
    let fixture = Fixture::new();
    assert_eq!(fixture.good("info model.df11"), fixture.good("inspect model.df11"));
}

#[test]
fn units_are_what_they_say() {
    let fixture = Fixture::new();
    let memory = |size: &str| {
        let report = fixture.json(&format!("estimate model.df11 --gpus {size}"));
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
    let folder = Folder::new();
    let file = |shell: &str| {
        let name = format!("_df11.{shell}");
        folder.write(&name, folder.good(&format!("completions {shell}")));
        folder.arg(&name)
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
    assert_eq!(folder.run("completions csh").status.code(), Some(2));
}

#[test]
fn there_is_a_manual_page() {
    let folder = Folder::new();
    let page = folder.good("man");
    assert!(page.contains(".TH df11 1") && page.contains("compress"), "{page}");
    assert!(folder.good("man compress").contains("no\\-verify"));
    folder.fails("man nothing", 2, &["no verb"]);
}
