//! The page of `df11 inspect --html`: whole in itself, and drawn by a browser.
//!
//! The browser is a headless Chromium. Without one, tests that need it say that they are
//! skipped, or fail if `DF11_REQUIRE_CHROMIUM` is set.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use df11::Dtype;
use serde_json::Value;

use crate::{
    command::{Folder, text},
    container::{Item, normal_weights},
};

/// Names that would be markup, or the end of the data.
const HOSTILE: &str = "</script><script>document.title='ran'</script><!--";

/// A container of these tensors.
fn compressed(folder: &Folder, name: &str, items: &[Item]) {
    folder.weights(&format!("{name}.safetensors"), items);
    folder.json(&format!("compress {name}.safetensors -o {name}.df11"));
}

fn weights(name: &str, seed: u64) -> Item {
    Item::raw(name, Dtype::BF16, &[256, 128], normal_weights(256 * 128, seed))
}

/// A folder with a container of a matrix, and of a tensor with a hostile name.
fn tiny() -> Folder {
    let folder = Folder::new();
    let hostile = Item::raw(HOSTILE, Dtype::F32, &[4], vec![0; 16]);
    compressed(&folder, "tiny", &[weights("a.weight", 1), hostile]);
    folder
}

/// The page with another script at its end, which notes errors.
fn with_script(page: &Path, script: &str) -> PathBuf {
    let trap = "<script>window.onerror = (message) => \
                { document.documentElement.dataset.error = message; };</script>";
    let all = fs::read_to_string(page).unwrap();
    let all = all.replacen("<style>", &format!("{trap}<style>"), 1);
    let copy = page.with_extension("tried.html");
    fs::write(&copy, all.replacen("</body>", &format!("<script>{script}</script></body>"), 1))
        .unwrap();
    copy
}

/// The page as a browser has drawn it, after `script` has run in it; `None` if there is no
/// browser.
fn drawn(page: &Path, script: &str) -> Option<String> {
    browsed(&with_script(page, script))
}

/// The message of `script` to the enclosing page, in a frame of this many pixels: a browser's own
/// window has a minimum width.
fn framed(page: &Path, width: u32, script: &str) -> Option<String> {
    let frame = with_script(page, script);
    let outer = page.with_extension("framed.html");
    let name = frame.file_name().unwrap().to_str().unwrap();
    let html = format!(
        "<iframe src=\"{name}\" style=\"border: 0; width: {width}px; height: 900px\"></iframe>\
         <pre id=\"said\"></pre><script>onmessage = (event) => \
         {{ document.getElementById('said').textContent = event.data; }};</script>"
    );
    fs::write(&outer, html).unwrap();
    browsed(&outer)
}

fn browsed(page: &Path) -> Option<String> {
    let profile = tempfile::tempdir().unwrap();
    let browser =
        ["chromium", "chromium-browser", "google-chrome"].into_iter().find_map(|browser| {
            let mut command = Command::new(browser);
            command.args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
            ]);
            command.arg(format!("--user-data-dir={}", profile.path().display()));
            command.args(["--window-size=1800,1000", "--virtual-time-budget=3000", "--dump-dom"]);
            command.arg(format!("file://{}", page.display())).output().ok()
        });
    let Some(output) = browser else {
        assert!(std::env::var_os("DF11_REQUIRE_CHROMIUM").is_none(), "no Chromium");
        eprintln!("skipped: there is no Chromium");
        return None;
    };
    assert!(output.status.success(), "{}", text(&output.stderr));
    let dom = String::from_utf8(output.stdout).unwrap();
    assert!(!dom.contains("data-error"), "{}", &dom[..dom.len().min(400)]);
    Some(dom)
}

/// The text of the element with this id, as far as its first child.
fn text_of<'a>(dom: &'a str, id: &str) -> &'a str {
    let start = dom.find(&format!("id=\"{id}\"")).unwrap_or_else(|| panic!("{id}"));
    let rest = &dom[start..];
    let rest = &rest[rest.find('>').unwrap() + 1..];
    &rest[..rest.find('<').unwrap()]
}

#[test]
fn the_page_is_whole_in_itself() {
    let folder = tiny();
    let said = folder.good("inspect tiny.df11 --html page.html");
    assert!(said.contains("html"), "{said}");
    let page = fs::read_to_string(folder.path("page.html")).unwrap();
    assert!(page.contains("default-src 'none'"));
    for word in [" src=", " href=", "@import", "url(", "fetch(", "XMLHttpRequest"] {
        assert!(!page.contains(word), "{word}: the page loads something");
    }
    assert_eq!(page.matches("</script>").count(), 2, "names cannot end the data");
    let data = page.split("id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    let blocks = data["models"][0]["blocks"].as_array().unwrap();
    let tensors = blocks.iter().flat_map(|block| block["tensors"].as_array().unwrap());
    let names: Vec<&str> = tensors.map(|tensor| tensor["name"].as_str().unwrap()).collect();
    assert!(names.contains(&HOSTILE) && names.contains(&"a.weight"), "{names:?}");

    folder.fails("inspect tiny.df11 --html page.html", 2, &["exists", "--force"]);
    folder.good("inspect tiny.df11 --html page.html --force");
    folder.fails("inspect tiny.df11 --html page.svg", 2, &["end it in .html"]);
}

#[test]
fn a_browser_draws_it() {
    let folder = tiny();
    folder.good("inspect tiny.df11 --html page.html");
    // Like a person at the keyboard: search, clear, sort, choose a bar, change the theme.
    let script = r##"
        const press = (key, on = document.activeElement) =>
            on.dispatchEvent(
                new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
        const said = {};
        said.all = at("found").textContent;
        press("/");
        said.focus = document.activeElement.id;
        at("query").value = "f32";
        at("query").dispatchEvent(new Event("input"));
        said.found = at("found").textContent;
        press("Escape");
        said.cleared = at("found").textContent;
        document.activeElement.blur();
        press("t", document.body);
        said.theme = document.documentElement.dataset.theme;
        const figure = document.querySelector("#exponents figure");
        figure.focus();
        press("End", figure);
        press("ArrowLeft", figure);
        said.caption = figure.querySelector("figcaption").textContent;
        const blocks = document.querySelector("#blocks figure");
        press("Home", blocks);
        press("Enter", blocks);
        said.block = at("query").value;
        document.querySelector("th [data-key=stored_bytes]").click();
        said.sort = document.querySelector("[aria-sort=ascending]").textContent;
        document.body.append(make("pre", { id: "said" }, JSON.stringify(said)));
    "##;
    let Some(dom) = drawn(&folder.path("page.html"), script) else { return };
    assert_ne!(text_of(&dom, "title"), "ran");
    assert_eq!(dom.matches("<title>tiny.df11</title>").count(), 1, "no name is run");
    let said: Value = serde_json::from_str(text_of(&dom, "said")).unwrap();
    assert_eq!(said["all"], "2 of 2 tensors");
    assert_eq!((&said["focus"], &said["found"]), (&"query".into(), &"1 of 2 tensors".into()));
    assert_eq!((&said["cleared"], &said["theme"]), (&"2 of 2 tensors".into(), &"light".into()));
    assert!(said["caption"].as_str().unwrap().starts_with("exponent 12"), "{said}");
    assert!(said["block"].as_str().unwrap().starts_with("block:"), "{said}");
    assert!(said["sort"].as_str().unwrap().starts_with("stored"), "{said}");
    assert!(dom.contains("not a float of 8, 16 or 32 bits") && dom.contains("of 256 values occur"));
}

#[test]
fn two_containers_are_compared() {
    let folder = Folder::new();
    let shared = weights("a.weight", 1);
    let one = [shared.clone(), weights("b.weight", 2), weights("c.weight", 3)];
    compressed(&folder, "one", &one);
    compressed(&folder, "two", &[shared, weights("b.weight", 9), weights("d.weight", 4)]);
    folder.good("inspect one.df11 two.df11 --html page.html");
    let Some(dom) = drawn(&folder.path("page.html"), "") else { return };
    assert_eq!(text_of(&dom, "title"), "one.df11 and two.df11");
    for row in [
        "in two.df11 too, with the same bits</td><td class=\"\" data-label=\"number\">1<",
        "in both, with other bits</td><td class=\"\" data-label=\"number\">1<",
        "in one.df11 alone</td><td class=\"\" data-label=\"number\">1<",
        "in two.df11 alone</td><td class=\"\" data-label=\"number\">1<",
    ] {
        assert!(dom.contains(row), "{row} in {dom}");
    }
    assert!(dom.contains("Different identities: 0 of 1 files are the same."), "{dom}");
}

/// Lists what reaches beyond the window or its own box, at each width and theme.
#[test]
fn nothing_is_cut_off() {
    let folder = Folder::new();
    let long = format!("model.layers.0.{}.weight", "mixture_of_experts".repeat(6));
    let items = [weights(&long, 1), weights("b.weight", 2), weights("c.weight", 3)];
    compressed(&folder, "a-name-of-a-model-that-is-as-long-as-they-are", &items);
    compressed(&folder, "two", &[weights(&long, 1), weights("b.weight", 9)]);
    let one = "a-name-of-a-model-that-is-as-long-as-they-are.df11";
    folder.good(&format!("inspect {one} --html one.html"));
    folder.good(&format!("inspect {one} two.df11 --html both.html"));
    let script = r##"
        setTheme(THEME);
        const out = [];
        for (const each of document.querySelectorAll("main *, header *")) {
            const box = each.getBoundingClientRect();
            const isWide = !each.closest("svg") && each.scrollWidth > each.clientWidth + 1
                && each.clientWidth > 0 && getComputedStyle(each).display !== "inline";
            if (box.right > innerWidth + 1 || box.left < -1 || isWide)
                out.push(`${each.tagName} ${each.textContent.slice(0, 30)}`);
        }
        const area = document.querySelector("#tensors .scroll");
        const said = { width: innerWidth, out, stacked: area.classList.contains("stacked") };
        parent.postMessage(JSON.stringify(said), "*");
    "##;
    for page in ["one.html", "both.html"] {
        for (at, width) in [400, 500, 900, 1400, 1600].into_iter().enumerate() {
            let script = script.replace("THEME", ["\"light\"", "\"dark\""][at % 2]);
            let Some(dom) = framed(&folder.path(page), width, &script) else { return };
            let said: Value = serde_json::from_str(text_of(&dom, "said")).unwrap();
            assert_eq!(said["width"], width, "the window is as wide as asked");
            assert_eq!(said["out"], Value::Array(Vec::new()), "{page} at {width} px");
            assert_eq!(said["stacked"], width <= 900, "{page} at {width} px");
        }
    }
}
