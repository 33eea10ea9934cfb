//! The logs of a running node: their folder, their recovery at the start, and a thread for each that writes it.
//!
//! Invariant: one node at a time uses a folder of logs.
//! Invariant: a store is served only after its log was replayed.

use super::{BindError, Shared, entropy, start_now};
use crate::log::{
    Disk, Found, Log, LogOptions, Next, Op, RecoverError, StoreLog, find, format::Source, recover,
};
use crate::node::{Node, Progress};
use farside_fabrics::memory::Mapping;
use farside_fabrics::shm::frame;
use farside_fabrics::timer;
use farside_remote::service::Work;
use rustix::fs::FlockOperation;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// The folder of the logs, and their options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogFolder {
    /// The folder, which is created if it is missing.
    pub path: PathBuf,
    /// Options of the logs.
    pub options: LogOptions,
}

/// The logs of a node, with their threads.
pub(super) struct Logs {
    folder: PathBuf,
    writers: Mutex<Vec<(Arc<StoreLog>, JoinHandle<()>)>>,
    stop: Arc<AtomicBool>,
    /// Locked file in the folder.
    _lock: File,
}

impl Logs {
    /// Locks the folder, creates the stores that the memory does not have, and replays all logs.
    pub(super) fn recover(
        folder: &LogFolder,
        node: &mut Node<Mapping>,
        memory: &Mapping,
    ) -> Result<Logs, BindError> {
        let LogFolder { path, options } = folder;
        let failed = |reason: String| BindError::Log(path.clone(), reason);
        let unusable = |error: io::Error| {
            failed(format!("the folder cannot be used: {error}; choose another --log-dir"))
        };
        std::fs::create_dir_all(path).map_err(unusable)?;
        let lock = File::options().create(true).truncate(false).write(true).open(path.join("lock"));
        let lock = lock.map_err(unusable)?;
        lock_soon(&lock).map_err(|errno| match errno {
            rustix::io::Errno::AGAIN => {
                failed("another node uses the folder; stop it, or choose another --log-dir".into())
            }
            errno => unusable(errno.into()),
        })?;
        node.set_logging(*options);
        let mut disk = FileDisk::new(path);
        disk.clean_up().map_err(unusable)?;
        for found in find(&mut disk).map_err(|error| failed(error.to_string()))? {
            resume(&mut disk, node, memory, &found, *options).map_err(failed)?;
        }
        for name in node.unlogged() {
            // Its contents are older than its log, so a checkpoint has to store them first.
            let store = node.catalog().get(&name).map_err(failed)?.store.clone();
            let mut log = Log::new(store, *options, entropy()[0]);
            log.want_checkpoint();
            node.resume_log(&name, Arc::new(StoreLog::new(log))).map_err(failed)?;
        }
        let (writers, stop) = (Mutex::default(), Arc::default());
        Ok(Logs { folder: path.clone(), writers, stop, _lock: lock })
    }

    /// Ends all writers, after they have written and synced what was appended.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        let writers = std::mem::take(&mut *self.writers.lock().unwrap_or_else(PoisonError::into_inner));
        for (log, thread) in writers {
            // Under the lock, so that the writer sees it before it sleeps.
            drop(log.lock());
            log.wake();
            drop(thread.join());
        }
    }
}

/// Replays a log into its store, which is created if the memory does not have it.
fn resume(
    disk: &mut FileDisk,
    node: &mut Node<Mapping>,
    memory: &Mapping,
    found: &Found,
    options: LogOptions,
) -> Result<(), String> {
    let Found { folder, store } = found;
    let name = &store.name;
    match node.catalog().get(name).map(|entry| (entry.store.id, entry.store.kind.clone())) {
        Ok((id, _)) if id == store.id => {}
        Ok(_) => {
            return Err(format!(
                "the memory has another store '{name}' than the log {folder}; serve the memory that belongs to the \
                 log, or move the log's folder away"
            ));
        }
        Err(_) if store.incarnation == node.info().incarnation => {
            // The memory was kept, and its catalog no longer has the store: its drop was recorded, and the log was not
            // removed before the node died.
            return disk.remove_folder(folder).map_err(|error| {
                format!("the log {folder} of a dropped store cannot be removed: {error}; remove the folder")
            });
        }
        Err(_) if store.membership.is_some() => {
            return Err(format!(
                "the log {folder} is of a store with several members, whose part at this node is lost with the memory; \
                 replace the member, and move the log's folder away"
            ));
        }
        Err(_) => {
            let ticket = node.recreate(store, entropy()[0]).map_err(|reason| {
                format!("the store '{name}' of the log {folder} cannot be created: {reason}")
            })?;
            while node.step(memory) == Ok(Progress::Made) {}
            match node.answer() {
                Some((answered, Ok(_))) if answered == ticket => {}
                other => {
                    return Err(format!(
                        "the store '{name}' could not be created anew: {other:?}; start again"
                    ));
                }
            }
        }
    }
    let served = Arc::clone(&node.catalog().get(name)?.served);
    let began = timer::now();
    let recovered = recover(disk, found, options, |record| {
        let Ok(replayed) = served.lock(Work::Live).replay(memory, start_now(), record);
        replayed
    });
    let recovered = recovered.map_err(|error: RecoverError| error.to_string())?;
    let Ok(ended) = served.lock(Work::Live).replayed(memory, start_now());
    ended.map_err(|reason| format!("cannot replay the log {folder}: {reason}"))?;
    let (records, torn) = (recovered.records, recovered.torn);
    if torn > 0 {
        tracing::warn!(
            "the log of store '{name}' ended with {torn} bytes of an incomplete write, which were cut off"
        );
    }
    let took = timer::now() - began;
    tracing::info!(records, "replayed the log of store '{name}' in {} ms", took.as_millis());
    let mut log = recovered.log;
    log.note_replay(records, took);
    node.resume_log(name, Arc::new(StoreLog::new(log)))?;
    Ok(())
}

impl Shared {
    /// Starts the thread that writes a log.
    pub(super) fn start_writer(self: &Arc<Shared>, log: Arc<StoreLog>) {
        let logs = self.logs.as_ref().expect("a node without a folder for logs begins none");
        let (shared, written) = (Arc::downgrade(self), Arc::clone(&log));
        let (stop, folder) = (Arc::clone(&logs.stop), logs.folder.clone());
        let thread = std::thread::Builder::new().name("farside-log".into()).spawn(move || {
            let mut disk = FileDisk::new(&folder);
            let after = |op: &Op| {
                written.announce();
                let Some(shared) = shared.upgrade() else { return };
                shared.note_stored();
                if op.concerns_node() {
                    frame::ring(&shared.bell);
                }
            };
            write(&written, &mut disk, &stop, after);
        });
        match thread {
            Ok(thread) => {
                logs.writers.lock().unwrap_or_else(PoisonError::into_inner).push((log, thread));
            }
            Err(error) => {
                let mut log = log.lock();
                log.abandon(&error);
                log.take_notes().iter().for_each(|note| tracing::error!("{note}"));
            }
        }
    }
}

/// Writes a log until the log is removed or `stop` is set. Calls `after` after each operation.
fn write(log: &StoreLog, disk: &mut FileDisk, stop: &AtomicBool, after: impl Fn(&Op)) {
    loop {
        let mut locked = log.lock();
        let op = loop {
            match locked.next(timer::now()) {
                Next::Do(op) => break op,
                Next::End => return,
                Next::Wait(_) if stop.load(Ordering::SeqCst) => {
                    if let Some(Err(error)) = locked.file_to_sync().map(|file| disk.sync(&file)) {
                        tracing::error!(
                            "the log of store '{}' could not be synced at the end: {error}",
                            locked.store().name
                        );
                    }
                    return;
                }
                Next::Wait(until) => {
                    let left = until.map(|until| until.saturating_sub(timer::now()));
                    locked = log.wait(locked, left);
                }
            }
        };
        drop(locked);
        let done = op.perform(disk);
        let notes = {
            let mut locked = log.lock();
            locked.done(done);
            locked.take_notes()
        };
        notes.iter().for_each(|note| tracing::warn!("{note}"));
        after(&op);
    }
}

/// Files in a folder of the host.
struct FileDisk {
    root: PathBuf,
    /// Open files. A log writes to at most two at a time.
    open: BTreeMap<String, File>,
}

/// Beginning of the name of a folder that is being removed.
const REMOVED: &str = ".removed-";
/// Number of attempts to lock a folder, and the pause after each.
const LOCK_ATTEMPTS: u32 = 100;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Locks a folder's lock file. Waits a little for a node that ends: a process that was just forked from it has the file
/// open until it executes its own program.
fn lock_soon(lock: &File) -> Result<(), rustix::io::Errno> {
    for _ in 1..LOCK_ATTEMPTS {
        match rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::AGAIN) => std::thread::sleep(LOCK_PAUSE),
            locked => return locked,
        }
    }
    rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive)
}

impl FileDisk {
    fn new(root: &Path) -> FileDisk {
        FileDisk { root: root.to_owned(), open: BTreeMap::new() }
    }

    /// Removes the folders whose removal was not complete.
    fn clean_up(&self) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.root)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(REMOVED) {
                std::fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(())
    }

    fn file(&mut self, name: &str) -> io::Result<&File> {
        if !self.open.contains_key(name) {
            let file = File::options().write(true).open(self.root.join(name))?;
            self.open.insert(name.to_owned(), file);
        }
        Ok(&self.open[name])
    }
}

fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

impl Disk for FileDisk {
    fn create(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let path = self.root.join(name);
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let file = File::options().create(true).truncate(true).write(true).open(&path)?;
        file.write_all_at(bytes, 0)?;
        self.open.insert(name.to_owned(), file);
        Ok(())
    }

    fn write_at(&mut self, name: &str, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.file(name)?.write_all_at(bytes, at)
    }

    fn cut(&mut self, name: &str, len: u64) -> io::Result<()> {
        self.file(name)?.set_len(len)
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        self.file(name)?.sync_data()
    }

    fn sync_names(&mut self, folder: &str) -> io::Result<()> {
        sync_folder(&self.root.join(folder))?;
        sync_folder(&self.root)
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        self.open.remove(from);
        std::fs::rename(self.root.join(from), self.root.join(to))
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        self.open.remove(name);
        std::fs::remove_file(self.root.join(name))
    }

    fn remove_folder(&mut self, folder: &str) -> io::Result<()> {
        self.open.clear();
        let removed = self.root.join(format!("{REMOVED}{folder}"));
        match std::fs::rename(self.root.join(folder), &removed) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            renamed => renamed?,
        }
        sync_folder(&self.root)?;
        std::fs::remove_dir_all(removed)
    }

    fn folders(&self) -> io::Result<Vec<String>> {
        let mut folders = Vec::new();
        for entry in std::fs::read_dir(&self.root)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                folders.push(entry.file_name().to_string_lossy().into_owned());
            }
        }
        folders.sort_unstable();
        Ok(folders)
    }

    fn files(&self, folder: &str) -> io::Result<Vec<String>> {
        let entries = std::fs::read_dir(self.root.join(folder))?;
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn open(&self, name: &str) -> io::Result<Box<dyn Source + '_>> {
        Ok(Box::new(FileSource(File::open(self.root.join(name))?)))
    }
}

struct FileSource(File);

impl Source for FileSource {
    fn read_at(&self, at: u64, out: &mut [u8]) -> io::Result<usize> {
        let mut read = 0;
        while read < out.len() {
            match self.0.read_at(&mut out[read..], at + read as u64) {
                Ok(0) => break,
                Ok(more) => read += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(read)
    }
}
