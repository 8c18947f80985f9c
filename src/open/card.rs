//! What a model card in a folder of containers is known by.
//!
//! It is no original file, and must not come back among those. So its last line seals it: whoever
//! reads the folder knows it for what it is as long as nobody has edited it.

use std::{fs, path::Path};

/// Where the card goes, and where if the model has a file of that name.
const NAMES: [&str; 2] = ["README.md", "DF11.md"];

/// No card is longer, in bytes.
const MAX_BYTES: u64 = 64 << 10;

const SEAL: &str = "<!-- written by df11 compress; BLAKE3 of the text above: ";
const END: &str = " -->\n";

/// The card's path, given those of the model's own files; `None` if both names are taken.
pub(crate) fn card_path(own: &[String]) -> Option<&'static str> {
    NAMES.into_iter().find(|name| !own.iter().any(|path| path.eq_ignore_ascii_case(name)))
}

/// Whether a path is that of a card which the Hub reads, by its first lines too.
pub(crate) fn has_front_matter(path: &str) -> bool {
    path == NAMES[0]
}

/// A card with its last line.
pub(crate) fn seal(text: &str) -> String {
    format!("{text}{SEAL}{}{END}", blake3::hash(text.as_bytes()).to_hex())
}

/// Whether a file in a folder is a card, as it was written.
pub(crate) fn is_card(root: &Path, path: &str) -> bool {
    let file = root.join(path);
    NAMES.contains(&path)
        && fs::metadata(&file)
            .is_ok_and(|metadata| metadata.is_file() && metadata.len() <= MAX_BYTES)
        && fs::read(file).is_ok_and(|bytes| is_sealed(&bytes))
}

fn is_sealed(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    text.rsplit_once(SEAL).is_some_and(|(above, _)| seal(above) == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_unedited_card_is_known() {
        let sealed = seal("# Model\n");
        assert!(is_sealed(sealed.as_bytes()));
        let edited =
            [sealed.replace("Model", "model"), format!("{sealed}more\n"), "# Model\n".to_owned()];
        for edited in edited {
            assert!(!is_sealed(edited.as_bytes()), "{edited}");
        }
    }

    #[test]
    fn the_name_is_one_that_is_free() {
        let of = |own: &[&str]| {
            card_path(&own.iter().map(|path| (*path).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(of(&["config.json"]), Some("README.md"));
        assert_eq!(of(&["Readme.md"]), Some("DF11.md"));
        assert_eq!(of(&["README.md", "df11.md"]), None);
    }
}
