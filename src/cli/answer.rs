//! What a verb has to say, in both forms.

use serde_json::Value;

/// The result of a verb: text for people, one JSON document for programs.
pub(super) struct Answer {
    /// Lines, without the last line feed.
    pub(super) text: String,
    /// An object with stable keys.
    pub(super) json: Value,
}

impl Answer {
    /// 2 for an answer that says of itself that it is not good, although nothing failed: not
    /// everything could be checked.
    pub(super) fn exit_code(&self) -> u8 {
        if self.json["good"] == false { 2 } else { 0 }
    }
}
