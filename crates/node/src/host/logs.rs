//! The logs of a running node: their folder, their recovery at the start, and a thread for each that writes it.
//!
//! Invariant: one node at a time uses a folder of logs.
//! Invariant: a store is served only once it and its log agree ([`crate::log::resume`]).

use super::{BindError, Shared, entropy, predecessors};
use crate::log::resume::{Host, Resuming, StartMemory};
use crate::log::{Disk, Log, LogOptions, Next, Op, StoreLog, find, format::Source};
use crate::node::Node;
use farside_fabrics::memory::Mapping;
use farside_fabrics::shm::frame;
use farside_fabrics::timer;
use rustix::fs::FlockOperation;
use std::collections::BTreeMap;
use std::convert::Infallible;
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
        create_folder(path).map_err(unusable)?;
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
        let is_same_boot = predecessors::is_same_boot(memory);
        let (disk, host) = (&mut disk, &mut ThisHost);
        let mut at = Resuming { disk, node, memory, options: *options, is_same_boot, host };
        for found in find(at.disk).map_err(|error| failed(error.to_string()))? {
            at.resume(&found).map_err(|error| failed(error.to_string()))?;
        }
        for name in at.node.unlogged() {
            at.begin(&name).map_err(|error| failed(error.to_string()))?;
        }
        let (writers, stop) = (Mutex::default(), Arc::default());
        Ok(Logs { folder: path.clone(), writers, stop, _lock: lock })
    }

    /// Ends all writers, after they have written and synced what was appended, as far as the disk has space.
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

/// The host of a node's process.
struct ThisHost;

impl Host for ThisHost {
    fn random(&mut self) -> u64 {
        entropy()[0]
    }

    fn now(&self) -> Duration {
        timer::now()
    }
}

impl StartMemory for Mapping {
    fn run_at_once<R>(&self, code: impl FnOnce(&Mapping) -> Result<R, Infallible>) -> R {
        let Ok(done) = code(self);
        done
    }
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
fn write(log: &StoreLog, disk: &mut dyn Disk, stop: &AtomicBool, after: impl Fn(&Op)) {
    let mut is_last_try = false;
    loop {
        let mut locked = log.lock();
        let op = loop {
            match locked.next(timer::now()) {
                Next::Do(op) => break op,
                Next::End => return,
                Next::Wait(_) if stop.load(Ordering::SeqCst) => {
                    if locked.unwritten() > 0 && !std::mem::replace(&mut is_last_try, true) {
                        locked.retry_now();
                        continue;
                    }
                    end(&locked, disk);
                    locked.end();
                    log.announce();
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

/// Syncs a log whose writer ends, and reports what is lost.
fn end(log: &Log, disk: &mut dyn Disk) {
    let name = &log.store().name;
    let unwritten = log.unwritten();
    if unwritten > 0 {
        let reason = log.refuses().unwrap_or("it has no space");
        tracing::error!(
            "the log of store '{name}' ends without its last {unwritten} records: {reason}; what was answered is in \
             the memory alone: keep the --memory-file"
        );
    }
    if let Some(Err(error)) = log.file_to_sync().map(|file| disk.sync(&file)) {
        tracing::error!("the log of store '{name}' could not be synced at the end: {error}");
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

/// Creates a folder with those that contain it, and makes the names of the new ones durable.
fn create_folder(path: &Path) -> io::Result<()> {
    let path = std::path::absolute(path)?;
    let missing: Vec<&Path> = path.ancestors().take_while(|folder| !folder.exists()).collect();
    std::fs::create_dir_all(&path)?;
    missing.iter().filter_map(|folder| folder.parent()).try_for_each(sync_folder)
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

    fn rename_folder(&mut self, from: &str, to: &str) -> io::Result<()> {
        self.open.clear();
        std::fs::rename(self.root.join(from), self.root.join(to))?;
        sync_folder(&self.root)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::engines::tests::ledger::Ledger;
    use crate::log::pairing::{Believed, believed};
    use crate::log::{SyncPolicy, format};
    use crate::node::Progress;
    use farside_fabrics::memory::Pages;
    use farside_remote::control::{Answer, Ask, NodeInfo};
    use farside_remote::service::{Kind, Records};

    /// A disk that refuses this number of writes.
    struct Full {
        refused: u32,
        written: Vec<u8>,
    }

    impl Disk for Full {
        fn create(&mut self, _: &str, _: &[u8]) -> io::Result<()> {
            Ok(())
        }
        fn write_at(&mut self, _: &str, _: u64, bytes: &[u8]) -> io::Result<()> {
            if self.refused > 0 {
                self.refused -= 1;
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.written.extend_from_slice(bytes);
            Ok(())
        }
        fn cut(&mut self, _: &str, _: u64) -> io::Result<()> {
            Ok(())
        }
        fn sync(&mut self, _: &str) -> io::Result<()> {
            Ok(())
        }
        fn sync_names(&mut self, _: &str) -> io::Result<()> {
            Ok(())
        }
        fn rename(&mut self, _: &str, _: &str) -> io::Result<()> {
            Ok(())
        }
        fn remove(&mut self, _: &str) -> io::Result<()> {
            Ok(())
        }
        fn rename_folder(&mut self, _: &str, _: &str) -> io::Result<()> {
            Ok(())
        }
        fn remove_folder(&mut self, _: &str) -> io::Result<()> {
            Ok(())
        }
        fn folders(&self) -> io::Result<Vec<String>> {
            Ok(Vec::new())
        }
        fn files(&self, _: &str) -> io::Result<Vec<String>> {
            Ok(Vec::new())
        }
        fn open(&self, _: &str) -> io::Result<Box<dyn Source + '_>> {
            Err(io::ErrorKind::NotFound.into())
        }
    }

    #[test]
    fn a_writer_that_ends_tries_once_more_what_a_full_disk_has_refused() {
        for (refused, left) in [(1, 0), (2, 1)] {
            let store = crate::log::format::tests::store();
            let options = LogOptions { sync: SyncPolicy::Interval, ..LogOptions::default() };
            let log = StoreLog::new(Log::new(store, options, 3));
            let mut records = Records::default();
            records.append(b"answered already");
            log.lock().append(&records).expect("accepted");
            let mut disk = Full { refused, written: Vec::new() };
            write(&log, &mut disk, &AtomicBool::new(true), |_| {});
            assert_eq!(log.lock().unwritten(), left, "{refused} writes refused");
            let is_written = disk.written.windows(16).any(|bytes| bytes == b"answered already");
            assert_eq!(is_written, left == 0, "{refused} writes refused");
        }
    }

    #[test]
    fn a_log_whose_writer_has_ended_lets_nobody_wait() {
        let store = crate::log::format::tests::store();
        let log = StoreLog::new(Log::new(store, LogOptions::default(), 3));
        let mut disk = Full { refused: 0, written: Vec::new() };
        write(&log, &mut disk, &AtomicBool::new(true), |_| {});
        let mut records = Records::default();
        records.append(b"nobody writes it");
        let refused = log.lock().append(&records).expect_err("nobody would answer");
        assert!(refused.contains("the node has ended") && refused.contains("nothing was done"), "{refused}");
    }

    /// A folder of the host that has no space for records or for the file of a pairing, or whose process dies right
    /// after the latter.
    struct Unpaired {
        files: FileDisk,
        refuses_records: bool,
        is_full: bool,
        is_last: bool,
    }

    impl Unpaired {
        fn new(folder: &Path) -> Unpaired {
            Unpaired { files: FileDisk::new(folder), refuses_records: false, is_full: false, is_last: false }
        }
    }

    impl Disk for Unpaired {
        fn create(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
            match self.is_full && name.ends_with("/pairing.new") {
                true => Err(io::ErrorKind::StorageFull.into()),
                false => self.files.create(name, bytes),
            }
        }
        fn write_at(&mut self, name: &str, at: u64, bytes: &[u8]) -> io::Result<()> {
            match self.refuses_records {
                true => Err(io::ErrorKind::StorageFull.into()),
                false => self.files.write_at(name, at, bytes),
            }
        }
        fn cut(&mut self, name: &str, len: u64) -> io::Result<()> {
            self.files.cut(name, len)
        }
        fn sync(&mut self, name: &str) -> io::Result<()> {
            self.files.sync(name)
        }
        fn sync_names(&mut self, folder: &str) -> io::Result<()> {
            self.files.sync_names(folder)
        }
        fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
            self.files.rename(from, to)?;
            assert!(!self.is_last, "the process dies");
            Ok(())
        }
        fn remove(&mut self, name: &str) -> io::Result<()> {
            self.files.remove(name)
        }
        fn rename_folder(&mut self, from: &str, to: &str) -> io::Result<()> {
            self.files.rename_folder(from, to)
        }
        fn remove_folder(&mut self, folder: &str) -> io::Result<()> {
            self.files.remove_folder(folder)
        }
        fn folders(&self) -> io::Result<Vec<String>> {
            self.files.folders()
        }
        fn files(&self, folder: &str) -> io::Result<Vec<String>> {
            self.files.files(folder)
        }
        fn open(&self, name: &str) -> io::Result<Box<dyn Source + '_>> {
            self.files.open(name)
        }
    }

    fn options() -> LogOptions {
        LogOptions { sync: SyncPolicy::Never, ..LogOptions::default() }
    }

    fn mapping() -> Mapping {
        Mapping::create(16 << 20, Pages::Small).expect("memory")
    }

    fn kinds() -> Vec<Box<dyn Kind<Mapping>>> {
        vec![Box::new(Ledger::default())]
    }

    fn node(memory: &Mapping, incarnation: u64) -> Node<Mapping> {
        Node::new(memory, kinds(), NodeInfo { incarnation, ..NodeInfo::default() })
    }

    /// A node that takes the memory of [`node()`] over.
    fn restored(memory: &Mapping) -> Node<Mapping> {
        let Ok(restored) = Node::restore(memory, kinds(), NodeInfo { incarnation: 1, ..NodeInfo::default() });
        let mut node = restored.expect("the memory is sound");
        while node.recover_step(memory) == Ok(Ok(false)) {}
        node
    }

    /// Creates the store 's' with a log.
    fn create(memory: &Mapping, disk: &mut dyn Disk) {
        let mut creator = node(memory, 1);
        creator.set_logging(options());
        let (name, kind, parameters) = ("s".to_owned(), "ledger".to_owned(), String::new());
        creator.ask(Ask::CreateStore { name, kind, parameters, quota: 4 << 20 }, [3, 4]);
        let mut logs = Vec::new();
        let answer = loop {
            while creator.step(memory) == Ok(Progress::Made) {}
            creator.poll_shared();
            logs.extend(creator.take_new_logs());
            for log in &logs {
                let mut log = log.lock();
                if let Next::Do(op) = log.next(Duration::ZERO) {
                    log.done(op.perform(disk));
                }
            }
            if let Some((_, answer)) = creator.answer() {
                break answer;
            }
        };
        assert!(matches!(answer, Ok(Answer::Store(_))), "{answer:?}");
    }

    /// Lets a node that starts resume the store 's'. Returns the node.
    fn resume(memory: &Mapping, disk: &mut dyn Disk, node: Node<Mapping>) -> Node<Mapping> {
        resume_with(options(), memory, disk, node)
    }

    fn resume_with(
        options: LogOptions,
        memory: &Mapping,
        disk: &mut dyn Disk,
        mut node: Node<Mapping>,
    ) -> Node<Mapping> {
        let found = find(disk).expect("the log is sound");
        let is_same_boot = predecessors::is_same_boot(memory);
        let (node_of, host) = (&mut node, &mut ThisHost);
        let mut at = Resuming { disk, node: node_of, memory, options, is_same_boot, host };
        found.iter().for_each(|found| at.resume(found).expect("it is replayed"));
        node
    }

    /// Appends a record to the log of the store 's'.
    fn append(node: &Node<Mapping>) -> Result<(), String> {
        let served = Arc::clone(&node.catalog().get("s").expect("the store").served);
        let mut records = Records::default();
        records.append(b"a record");
        served.log().expect("it has a log").lock().append(&records).map(drop)
    }

    /// A memory that was paired with the log may come back later. It lacks what the log gets from now on.
    #[test]
    fn a_log_that_cannot_be_paired_with_another_memory_accepts_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut disk = Unpaired::new(folder.path());
        create(&mapping(), &mut disk);
        for (incarnation, is_full, is_accepted) in
            [(2, true, false), (1, true, false), (2, false, true), (2, true, false), (3, true, false)]
        {
            disk.is_full = is_full;
            let memory = mapping();
            let appended = append(&resume(&memory, &mut disk, node(&memory, incarnation)));
            assert_eq!(appended.is_ok(), is_accepted, "{incarnation}, {is_full}: {appended:?}");
            let refused = appended.err().unwrap_or_else(|| "be paired with the memory".into());
            assert!(refused.contains("be paired with the memory"), "{refused}");
        }
    }

    /// The next start believes the memory, which has what is answered from now on.
    #[test]
    fn a_log_that_cannot_be_paired_anew_with_the_memory_it_has_goes_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut disk = Unpaired::new(folder.path());
        let memory = mapping();
        predecessors::note_boot(&memory);
        create(&memory, &mut disk);
        drop(resume(&memory, &mut disk, restored(&memory)));
        disk.is_full = true;
        for _ in 0..2 {
            append(&resume(&memory, &mut disk, restored(&memory))).expect("it is accepted");
        }
    }

    /// The memory may have effects that its log lacks, since a process may die before it has written them.
    #[test]
    fn a_memory_is_believed_after_a_death_between_the_two_halves_of_its_pairing() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut disk = Unpaired::new(folder.path());
        let memory = mapping();
        predecessors::note_boot(&memory);
        create(&memory, &mut disk);
        drop(resume(&memory, &mut disk, restored(&memory)));
        for _ in 0..2 {
            disk.is_last = true;
            let dying = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                resume(&memory, &mut disk, restored(&memory))
            }));
            assert!(dying.is_err(), "it dies before the memory has the new number");
            disk.is_last = false;
            let found = find(&mut disk).expect("the log is sound").pop().expect("the store's log");
            let paired = restored(&memory).catalog().get("s").expect("the store").paired().copied();
            let paired = paired.expect("it is paired");
            assert_ne!(paired.number, found.pairing.number);
            let source = believed(&found.pairing, found.is_whole, Some(&paired), true);
            assert_eq!(source, Ok(Believed::Memory));
        }
        let node = resume(&memory, &mut disk, restored(&memory));
        let found = find(&mut disk).expect("the log is sound").pop().expect("the store's log");
        let paired = node.catalog().get("s").expect("the store").paired().copied().expect("it is paired");
        assert_eq!((found.pairing.number, found.pairing.former), (paired.number, None));
    }

    /// The log has a put that was never answered. Until it is taken back, a later record could be lost by its replay.
    #[test]
    fn a_log_that_cannot_take_back_what_its_memory_lacks_accepts_nothing() {
        for sync in [SyncPolicy::Never, SyncPolicy::Interval, SyncPolicy::Each] {
            let folder = tempfile::tempdir().expect("a folder");
            let mut disk = Unpaired::new(folder.path());
            let memory = mapping();
            predecessors::note_boot(&memory);
            create(&memory, &mut disk);
            drop(resume(&memory, &mut disk, restored(&memory)));
            let found = find(&mut disk).expect("the log is sound").pop().expect("the store's log");
            let file = folder.path().join(&found.folder).join("log.00000001");
            let source = FileSource(File::open(&file).expect("a file"));
            let contents =
                format::read::<io::Error>(&source, |_, _| Ok(())).expect("no error").expect("a head");
            let mut frame = Vec::new();
            let put = [1u64, 5, 10].map(u64::to_le_bytes).concat();
            format::put_frame(&mut frame, contents.salt, contents.next, 0, &put);
            disk.files
                .write_at(&format!("{}/log.00000001", found.folder), contents.len, &frame)
                .expect("written");
            let options = LogOptions { sync, ..options() };
            let records = |disk: &mut Unpaired| {
                let mut records = Vec::new();
                let recovered = crate::log::recover(disk, &found, options, |record| {
                    records.push(record.to_vec());
                    Ok(())
                });
                recovered.expect("the log is sound");
                records
            };
            disk.refuses_records = true;
            let node = resume_with(options, &memory, &mut disk, restored(&memory));
            let refused = append(&node).expect_err("it has no space for what is taken back");
            assert!(refused.contains("could not take back what was never answered"), "{sync:?}: {refused}");
            assert_eq!(records(&mut disk), std::slice::from_ref(&put), "{sync:?}");
            disk.refuses_records = false;
            let node = resume_with(options, &memory, &mut disk, restored(&memory));
            append(&node).expect("it is accepted");
            // The key has no value, and gets a stamp after that of the put. The first attempt has drawn one, too.
            assert_eq!(records(&mut disk), [put, [1u64, 7, 0].map(u64::to_le_bytes).concat()], "{sync:?}");
        }
    }

    #[test]
    fn a_folder_is_created_with_those_that_contain_it() {
        let root = tempfile::tempdir().expect("a folder");
        let path = root.path().join("a/b");
        create_folder(&path).expect("created");
        create_folder(&path).expect("it exists");
        assert!(path.is_dir());
    }
}
