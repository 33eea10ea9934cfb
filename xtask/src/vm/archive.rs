//! Writes an archive of files as the kernel reads it for its first root: cpio in the format "newc".
//!
//! Each entry is a header of hexadecimal numbers, its name and its bytes, the last two padded to 4 bytes. See
//! `Documentation/driver-api/early-userspace/buffer-format.rst` of Linux.

/// Files of the kernel's first root.
pub(super) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

impl Archive {
    pub(super) fn new() -> Archive {
        Archive { bytes: Vec::new(), entries: 0 }
    }

    pub(super) fn folder(&mut self, name: &str) {
        self.entry(name, FOLDER, b"");
    }

    /// Adds a file that may be executed.
    pub(super) fn file(&mut self, name: &str, bytes: &[u8]) {
        self.entry(name, PROGRAM, bytes);
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, b"");
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, bytes: &[u8]) {
        self.entries += 1;
        let len = u32::try_from(bytes.len()).expect("a file below 4 GiB");
        let name_len = u32::try_from(name.len() + 1).expect("a short name");
        // Number, mode, owner, group, links, time, length, device and special device (two numbers each), length of the
        // name, check sum.
        let fields = [self.entries, mode, 0, 0, 1, 0, len, 0, 0, 0, 0, name_len, 0];
        self.bytes.extend_from_slice(b"070701");
        fields.iter().for_each(|field| self.bytes.extend_from_slice(format!("{field:08x}").as_bytes()));
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(bytes);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_padded_to_four_bytes() {
        let mut archive = Archive::new();
        archive.folder("bin");
        archive.file("bin/sh", b"12345");
        let bytes = archive.finish();
        let header = 6 + 13 * 8;
        assert_eq!(&bytes[..14], b"07070100000001");
        assert_eq!(&bytes[header..header + 4], b"bin\0");
        let second = (header + 4).next_multiple_of(4);
        assert_eq!(&bytes[second..second + 6], b"070701");
        assert_eq!(&bytes[second + header..second + header + 7], b"bin/sh\0");
        let body = (second + header + 7).next_multiple_of(4);
        assert_eq!(&bytes[body..body + 8], b"12345\0\0\0");
        assert_eq!(&bytes[body + 8..body + 14], b"070701");
        assert!(bytes.len().is_multiple_of(4) && bytes.windows(10).any(|name| name == b"TRAILER!!!"));
    }
}
