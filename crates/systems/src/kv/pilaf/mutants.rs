//! Broken variants of Pilaf's readers.

farside_remote::mutants! {
    /// A reader of Pilaf believes entries whose CRC is another's: it READs where nothing is, or beyond a buffer's end,
    /// and fails although nobody did wrong.
    ENTRY_UNCHECKED = "PilafEntryUnchecked";
    /// A reader of Pilaf believes items whose CRC is another's: it answers bytes that no put has written.
    ITEM_UNCHECKED = "PilafItemUnchecked";
    /// A reader of Pilaf looks at an entry's CRC after it has READ as many bytes as the entry says: it fails where
    /// there are not so many.
    SIZE_TRUSTED = "PilafSizeTrusted";
}
