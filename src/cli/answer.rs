//! What a verb has to say, in both forms.

use serde_json::Value;

/// The result of a verb: text for people, one JSON document for programs.
pub(super) struct Answer {
    /// Lines, without the last line feed.
    pub(super) text: String,
    /// An object with stable keys.
    pub(super) json: Value,
}
