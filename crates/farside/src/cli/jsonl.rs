//! Keys and values in JSON: text where they are UTF-8, base64 where they are not.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

/// Puts bytes into an object, as `NAME`, or as `NAME_base64` if they are no text.
pub(super) fn insert(object: &mut serde_json::Map<String, Value>, name: &str, bytes: &[u8]) {
    match std::str::from_utf8(bytes) {
        Ok(text) => object.insert(name.to_owned(), text.into()),
        Err(_) => object.insert(format!("{name}_base64"), STANDARD.encode(bytes).into()),
    };
}
