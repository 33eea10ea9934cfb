//! A simulated disk with the files of logs. If the machine crashes, what was not synced may be lost, or torn, and what
//! was cut off a file may come back. The end of a process alone loses nothing. The disk may be full.
//!
//! Invariant: what was synced survives, and so do the names of files after their folder was synced.

use crate::random::Random;
use farside_node::log::Disk;
use farside_node::log::format::Source;
use std::collections::BTreeMap;
use std::io;

/// Files, by `FOLDER/FILE`.
#[derive(Default)]
pub struct SimDisk {
    files: BTreeMap<String, File>,
    is_full: bool,
    fails_to_sync: bool,
    counts: Counts,
}

/// How often the disk's faults struck.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of writes that a full disk refused, some of them after a part of the bytes.
    pub full: u64,
    /// Number of files of which a crash lost bytes.
    pub lost: u64,
    /// Number of files in which a crash left other bytes in place of those that were written.
    pub torn: u64,
    /// Number of cuts that a crash took back.
    pub uncut: u64,
    /// Number of syncs.
    pub syncs: u64,
    /// Number of syncs that failed.
    pub failed_syncs: u64,
}

#[derive(Clone, Default)]
struct File {
    bytes: Vec<u8>,
    /// The contents as of the last sync.
    synced: Vec<u8>,
    /// The contents before the file was cut, if they may come back: nothing was written or synced since.
    uncut: Option<Vec<u8>>,
    /// Whether the folder was synced since the file got its name.
    has_durable_name: bool,
}

impl SimDisk {
    /// Sets whether the disk is full. Writes to a full disk store some of their bytes and fail.
    pub fn set_full(&mut self, is_full: bool) {
        self.is_full = is_full;
    }

    /// Sets whether the next syncs fail.
    pub fn set_fails_to_sync(&mut self, fails: bool) {
        self.fails_to_sync = fails;
    }

    /// How often the disk's faults struck.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Size of a file in bytes, if it exists.
    pub fn size(&self, name: &str) -> Option<usize> {
        self.files.get(name).map(|file| file.bytes.len())
    }

    /// Names of all files.
    pub fn names(&self) -> Vec<String> {
        self.files.keys().cloned().collect()
    }

    /// Changes one byte of a file, as a fault of the medium does.
    ///
    /// # Panics
    /// There is no such byte.
    pub fn damage(&mut self, name: &str, at: usize) {
        let file = self.files.get_mut(name).expect("the file exists");
        file.bytes[at] ^= 0x40;
        file.synced.clone_from(&file.bytes);
    }

    /// The machine crashes. Of what was not synced, each file keeps a part, in which some bytes may be others.
    pub fn crash(&mut self, random: &Random) {
        if self.files.is_empty() {
            return;
        }
        let counts = &mut self.counts;
        self.files.retain(|_, file| file.has_durable_name || random.one_in(2));
        for file in self.files.values_mut() {
            file.has_durable_name = true;
            if let Some(uncut) = file.uncut.take()
                && random.one_in(2)
            {
                file.bytes = uncut;
                counts.uncut += 1;
            }
            if file.bytes == file.synced {
                continue;
            }
            let same = file.bytes.iter().zip(&file.synced).take_while(|(now, then)| now == then).count();
            let kept = same + random.below((file.bytes.len() - same) as u64 + 1) as usize;
            counts.lost += u64::from(kept < file.bytes.len());
            file.bytes.truncate(kept);
            if kept > same && random.one_in(3) {
                // A sector that was never written, in the middle of others that were.
                let at = same + random.below((kept - same) as u64) as usize;
                let end = kept.min(at + 1 + random.below(64) as usize);
                file.bytes[at..end].fill(0);
                counts.torn += 1;
            }
            file.synced.clone_from(&file.bytes);
        }
    }

    fn file(&mut self, name: &str) -> io::Result<&mut File> {
        self.files.get_mut(name).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }
}

impl Disk for SimDisk {
    fn create(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        if self.is_full {
            self.counts.full += 1;
            return Err(io::ErrorKind::StorageFull.into());
        }
        let file = File { bytes: bytes.to_vec(), ..File::default() };
        self.files.insert(name.to_owned(), file);
        Ok(())
    }

    fn write_at(&mut self, name: &str, at: u64, bytes: &[u8]) -> io::Result<()> {
        let is_full = self.is_full;
        let file = self.file(name)?;
        let written = if is_full { &bytes[..bytes.len() / 2] } else { bytes };
        let (at, end) = (at as usize, at as usize + written.len());
        file.uncut = None;
        file.bytes.resize(file.bytes.len().max(end), 0);
        file.bytes[at..end].copy_from_slice(written);
        if is_full {
            self.counts.full += 1;
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    }

    fn cut(&mut self, name: &str, len: u64) -> io::Result<()> {
        let file = self.file(name)?;
        if file.bytes.len() > len as usize {
            file.uncut = Some(file.bytes.clone());
            file.bytes.truncate(len as usize);
        }
        Ok(())
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        if self.fails_to_sync {
            self.counts.failed_syncs += 1;
            return Err(io::Error::other("an error of the medium"));
        }
        let file = self.file(name)?;
        file.synced.clone_from(&file.bytes);
        file.uncut = None;
        self.counts.syncs += 1;
        Ok(())
    }

    fn sync_names(&mut self, folder: &str) -> io::Result<()> {
        let of_folder = |name: &str| name.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/'));
        let files = self.files.iter_mut().filter(|(name, _)| of_folder(name));
        files.for_each(|(_, file)| file.has_durable_name = true);
        Ok(())
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        let file = self.files.remove(from).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        self.files.insert(to.to_owned(), file);
        Ok(())
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        self.files.remove(name);
        Ok(())
    }

    fn rename_folder(&mut self, from: &str, to: &str) -> io::Result<()> {
        let files =
            std::mem::take(&mut self.files).into_iter().map(|(name, file)| match name.split_once('/') {
                Some((folder, rest)) if folder == from => (format!("{to}/{rest}"), file),
                _ => (name, file),
            });
        self.files = files.collect();
        Ok(())
    }

    fn remove_folder(&mut self, folder: &str) -> io::Result<()> {
        self.files.retain(|name, _| name.split_once('/').is_none_or(|(of, _)| of != folder));
        Ok(())
    }

    fn folders(&self) -> io::Result<Vec<String>> {
        let mut folders: Vec<String> =
            self.files.keys().filter_map(|name| Some(name.split_once('/')?.0.to_owned())).collect();
        folders.dedup();
        Ok(folders)
    }

    fn files(&self, folder: &str) -> io::Result<Vec<String>> {
        let named = self.files.keys().filter_map(|name| name.split_once('/'));
        Ok(named.filter(|(of, _)| *of == folder).map(|(_, file)| file.to_owned()).collect())
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn Source + '_>> {
        let file = self.files.get(name).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        Ok(Box::new(Contents(&file.bytes)))
    }
}

/// The contents of a file.
struct Contents<'a>(&'a [u8]);

impl Source for Contents<'_> {
    fn read_at(&self, at: u64, out: &mut [u8]) -> io::Result<usize> {
        let rest = self.0.get(at as usize..).unwrap_or_default();
        let len = rest.len().min(out.len());
        out[..len].copy_from_slice(&rest[..len]);
        Ok(len)
    }
}
