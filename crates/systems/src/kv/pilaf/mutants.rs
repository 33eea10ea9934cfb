//! Broken variants of Pilaf's readers.

farside_remote::mutants! {
    /// A GET does not check the entry's CRC. It READs at a wrong address or beyond a buffer's end, and fails without a
    /// fault.
    ENTRY_UNCHECKED = "PilafEntryUnchecked";
    /// A GET does not check the item's CRC. It returns bytes that no put has written.
    ITEM_UNCHECKED = "PilafItemUnchecked";
    /// A GET READs the item with the entry's size and checks the entry's CRC afterwards. It fails if the size is torn
    /// and exceeds the buffer.
    SIZE_TRUSTED = "PilafSizeTrusted";
    /// A GET does not check the item's CRC. Instead, it READs the entry again in the same chain, after the item, and
    /// accepts the item if the entry has not changed. This is correct only where two READs of a chain keep their order:
    /// a NIC may execute the second one first, and return bytes that no put has written.
    READS_KEEP_ORDER = "PilafReadsKeepOrder";
}
