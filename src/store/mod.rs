//! Containers in object stores, on HTTP servers and on the Hub: `name → place → objects → ranges`.
//!
//! ```text
//! s3://bucket/model-df11            place: a file or a folder, and how to reach it (place, hub)
//!   model-00001-of-00002.df11       object: pinned by its ETag, read by ranges (object)
//!     |head| … sections … |directory|   two requests open it
//!     |··[=== piece ===][=== piece ===]··|   ranges that are wanted soon, joined (ahead)
//!     |[piece][=== piece ===][= piece =]|   or all of it, into memory (arrival)
//! ```
//! The crate `object_store` handles credentials, signatures and listings. Retries are in [`fetch`]:
//! a retry continues where the response broke off, and compares the object's version.

mod ahead;
mod arrival;
mod batches;
mod client;
mod fault;
mod fetch;
mod hub;
mod interrupt;
mod name;
mod object;
mod place;
mod runtime;
mod upload;

pub(crate) use fetch::{Patience, memory_of};
pub(crate) use hub::Repository;
pub use interrupt::end_waits_when;
pub(crate) use interrupt::{check as check_interrupt, end_waits_with};
pub(crate) use object::Object;
pub(crate) use place::{Content, Place, STEMS};
