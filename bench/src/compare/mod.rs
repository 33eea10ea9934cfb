//! Rivals: other stores, which run the same workload as the systems of [`crate::driver`].
//!
//! * [`redis`], [`memcached`]: the rivals' protocols, as functions from bytes to answers.
//! * [`Client`]: one connection with a fixed number of operations in flight, in one to four batches. The client sends
//!   a batch in one write. When all answers to a batch have arrived, the next batch takes its place. With several
//!   batches, client and server work concurrently.
//! * [`lmdb`]: LMDB, a library that needs no server.
//! * [`redis_txn`]: transactions of Redis.
//! * [`rows`]: results of a comparison, for people and scripts.
//! * [`benchmark`]: results of a rival's own benchmark.
//!
//! Invariant: the same code draws and checks operations, keys and values for rivals and for our systems.
//! Invariant: a server's answer is untrusted input. An answer is either parsed or quoted in an error. At most
//! [`ANSWER_BYTES_MAX`] bytes of one answer are kept.

pub mod benchmark;
#[cfg(feature = "lmdb")]
pub mod lmdb;
pub mod memcached;
pub mod redis;
pub mod redis_txn;
pub mod rows;
mod words;

use crate::kv::{Drawn, KvTrouble, Thread, fill, looks_right};
use crate::workload::{Lengths, Operation, Workload};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::cell::Cell;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Maximum length of an accepted answer to one request, in bytes.
pub const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Maximum time that a client waits for an answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Number of polls of a socket between two readings of the clock.
const LOOKS: u32 = 4096;
/// Number of operations for each sampled latency. The number is one more than our driver's, so that the sampled
/// position in a batch changes.
const SAMPLED: u64 = 65;
/// Operations and batches in flight while a store is loaded.
const LOADING: Shape = Shape { depth: 256, batches: 2 };

/// Protocol of a rival.
///
/// A client sends all reads of a batch before all its writes, and the server answers in the same order.
pub trait Dialect {
    /// Request for the server's process id.
    const HELLO: &'static [u8];

    /// Parses the server's process id from the answer to [`Dialect::HELLO`]; `None` if the answer is incomplete.
    ///
    /// # Errors
    /// The bytes are another answer.
    fn pid(bytes: &[u8]) -> Result<Option<u32>, String>;

    /// Appends requests to read these records to `out`.
    fn encode_reads(keys: &[u64], out: &mut Vec<u8>);

    /// Appends a request to `out` that stores a record and asks for an acknowledgement.
    fn encode_write(key: u64, value: &[u8], out: &mut Vec<u8>);

    /// Returns the length in bytes of the part before the answers to `count` reads, or `None` if that part is
    /// incomplete.
    ///
    /// # Errors
    /// The bytes are another answer.
    #[inline]
    fn before_reads(_bytes: &[u8], _count: usize) -> Result<Option<usize>, String> {
        Ok(Some(0))
    }

    /// Parses the answer to a read of `key` at the start of `bytes`; `None` if the answer is incomplete.
    ///
    /// # Errors
    /// The bytes are no answer to a read.
    fn read(bytes: &[u8], key: u64) -> Result<Option<Answer<'_>>, String>;

    /// Returns the length in bytes of the part after the answers to reads, or `None` if that part is incomplete.
    ///
    /// # Errors
    /// The bytes are another answer.
    #[inline]
    fn after_reads(_bytes: &[u8]) -> Result<Option<usize>, String> {
        Ok(Some(0))
    }

    /// Returns the length in bytes of the acknowledgement of a write, or `None` if the acknowledgement is incomplete.
    ///
    /// # Errors
    /// The record was not stored.
    fn written(bytes: &[u8]) -> Result<Option<usize>, String>;
}

/// A rival's answer to a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer<'b> {
    /// Length of the whole answer in bytes.
    pub len: usize,
    /// Value of the record; `None` if the record is absent.
    pub value: Option<&'b [u8]>,
}

/// Address of a rival's server.
#[derive(Clone, Debug)]
pub enum Address {
    /// IP address and TCP port.
    Tcp(SocketAddr),
    /// Path of a unix socket.
    Unix(PathBuf),
}

/// Way in which a client waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// The client sleeps until the kernel wakes it.
    Asleep,
    /// The client polls its socket.
    Awake,
}

/// Shape of the load: the number of operations in flight, and the number of batches that these form. A batch has at
/// least one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of operations in flight.
    pub depth: u32,
    /// Number of batches in flight.
    pub batches: u32,
}

/// One connection to a rival's server.
pub struct Client<D: Dialect> {
    link: Link,
    waiting: Waiting,
    inbox: Inbox,
    out: Vec<u8>,
    keys: Vec<u64>,
    value: Vec<u8>,
    dialect: std::marker::PhantomData<D>,
}

/// Checks that the rivals support a workload.
///
/// # Errors
/// The workload has operations that are not compared here, or values of several lengths.
pub fn check(workload: &Workload) -> Result<(), String> {
    if workload.lengths != Lengths::Constant {
        return Err(format!(
            "workload {} has values of several lengths, which are not compared: omit fieldlengthdistribution",
            workload.name
        ));
    }
    for operation in [Operation::Insert, Operation::Scan] {
        if workload.mix.share(operation) > 0.0 {
            return Err(format!(
                "workload {} has operations of kind '{operation}', which are not compared: choose a, b, c or f, or a \
                 file with only reads, updates and read-modify-writes",
                workload.name
            ));
        }
    }
    Ok(())
}

impl<D: Dialect> Client<D> {
    /// Connects to a server, for values of `value_size` bytes.
    ///
    /// # Errors
    /// The connection failed.
    pub fn connect(address: &Address, waiting: Waiting, value_size: usize) -> std::io::Result<Client<D>> {
        let link = match address {
            Address::Tcp(address) => {
                let stream = TcpStream::connect_timeout(address, PATIENCE)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                Link::Tcp(stream)
            }
            Address::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                Link::Unix(stream)
            }
        };
        Ok(Client {
            link,
            waiting,
            inbox: Inbox::default(),
            out: Vec::new(),
            keys: Vec::new(),
            value: vec![0; value_size],
            dialect: std::marker::PhantomData,
        })
    }

    /// Requests the server's process id.
    ///
    /// # Errors
    /// The server does not report its process id.
    pub fn server_pid(&mut self) -> Result<u32, String> {
        self.out.clear();
        self.out.extend_from_slice(D::HELLO);
        self.send()?;
        loop {
            if let Some(pid) = D::pid(self.inbox.bytes())? {
                self.inbox.take(self.inbox.bytes().len());
                return Ok(pid);
            }
            self.receive()?;
        }
    }

    /// Stores the records with these numbers. Calls `progress` after each record.
    ///
    /// # Errors
    /// Returns the reason why a record was not stored.
    pub fn load(
        &mut self,
        mut numbers: impl Iterator<Item = u64>,
        mut progress: impl FnMut(),
    ) -> Result<(), String> {
        let next = || numbers.next().map(|key| Drawn { key, operation: Operation::Update });
        self.drive(LOADING, next, |_| progress())
    }

    /// Performs the operations of `thread` while `goes_on` returns true.
    ///
    /// # Errors
    /// The server refused an operation, closed the connection, or sent an invalid answer.
    pub fn work(&mut self, thread: &Thread, shape: Shape, goes_on: impl Fn() -> bool) -> Result<(), String> {
        let doubt = Cell::new(0);
        let next = || (goes_on() && thread.may_begin()).then(|| thread.draw(doubt.take()));
        let done = |slot: &Slot| {
            doubt.set(usize::from(slot.wrong));
            if slot.wrong {
                thread.count_trouble(&KvTrouble::Wrong(slot.drawn.key));
            }
            thread.count(slot.drawn, slot.since);
        };
        self.drive(shape, next, done)
    }

    /// Keeps `shape.depth` operations in flight until `next` returns `None` and all operations are done.
    fn drive(
        &mut self,
        shape: Shape,
        mut next: impl FnMut() -> Option<Drawn>,
        mut done: impl FnMut(&Slot),
    ) -> Result<(), String> {
        let mut batches: Vec<Batch> = shape.sizes().map(Batch::new).collect();
        let mut drawn = 0;
        for batch in &mut batches {
            batch.renew(&mut next, &mut drawn, &mut done);
            self.send_batch(batch)?;
        }
        while batches.iter().any(|batch| !batch.slots.is_empty()) {
            for batch in batches.iter_mut().filter(|batch| !batch.slots.is_empty()) {
                self.receive_batch(batch)?;
                batch.renew(&mut next, &mut drawn, &mut done);
                self.send_batch(batch)?;
            }
        }
        Ok(())
    }

    /// Sends the requests of a batch.
    fn send_batch(&mut self, batch: &Batch) -> Result<(), String> {
        let (reads, writes) = batch.slots.split_at(batch.reads);
        self.out.clear();
        if !reads.is_empty() {
            self.keys.clear();
            self.keys.extend(reads.iter().map(|slot| slot.drawn.key));
            D::encode_reads(&self.keys, &mut self.out);
        }
        for slot in writes {
            fill(slot.drawn.key, &mut self.value);
            D::encode_write(slot.drawn.key, &self.value, &mut self.out);
        }
        self.send()
    }

    /// Receives all answers to a batch.
    fn receive_batch(&mut self, batch: &mut Batch) -> Result<(), String> {
        let (reads, writes) = batch.slots.split_at_mut(batch.reads);
        if !reads.is_empty() {
            let count = reads.len();
            self.skip(|bytes| D::before_reads(bytes, count))?;
            for slot in reads {
                slot.wrong = self.receive_value(slot.drawn.key)?;
            }
            self.skip(D::after_reads)?;
        }
        writes.iter().try_for_each(|_| self.skip(D::written))
    }

    /// Receives the value of `key`. Returns whether the value is wrong.
    #[inline]
    fn receive_value(&mut self, key: u64) -> Result<bool, String> {
        loop {
            if let Some(answer) = D::read(self.inbox.bytes(), key)? {
                let wrong = !answer.value.is_some_and(|value| looks_right(key, self.value.len(), value));
                let len = answer.len;
                self.inbox.take(len);
                return Ok(wrong);
            }
            self.receive()?;
        }
    }

    /// Receives and skips a part of an answer. `expected` returns the part's length in bytes.
    #[inline]
    fn skip(&mut self, expected: impl Fn(&[u8]) -> Result<Option<usize>, String>) -> Result<(), String> {
        loop {
            if let Some(len) = expected(self.inbox.bytes())? {
                self.inbox.take(len);
                return Ok(());
            }
            self.receive()?;
        }
    }

    /// Sends all bytes of `out`. Receives answers meanwhile, because a server may stop reading until its answers are
    /// read.
    fn send(&mut self) -> Result<(), String> {
        let mut sent = 0;
        while sent < self.out.len() {
            match send(&self.link, &self.out[sent..], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(more) => sent += more,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let either = PollFlags::IN | PollFlags::OUT;
                    let mut fds = [PollFd::new(&self.link, either)];
                    let patience = PATIENCE.try_into().expect("a few seconds");
                    if poll(&mut fds, Some(&patience)) == Ok(0) {
                        return Err(silent());
                    }
                    if fds[0].revents().contains(PollFlags::IN) {
                        self.receive()?;
                    }
                }
                Err(error) => return Err(format!("the connection failed: {error}")),
            }
        }
        Ok(())
    }

    /// Waits until bytes arrive, and receives all bytes that have arrived.
    fn receive(&mut self) -> Result<(), String> {
        let place = self.inbox.place()?;
        let flags = match self.waiting {
            Waiting::Asleep => RecvFlags::empty(),
            Waiting::Awake => RecvFlags::DONTWAIT,
        };
        let mut since = None;
        let mut looks = 0;
        let received = loop {
            match recv(&self.link, &mut *place, flags) {
                Ok((_, received)) => break received,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if self.waiting == Waiting::Awake => {
                    std::hint::spin_loop();
                    looks += 1;
                    if looks % LOOKS == 0 && since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                        return Err(silent());
                    }
                }
                Err(Errno::AGAIN) => return Err(silent()),
                Err(error) => return Err(format!("the connection failed: {error}")),
            }
        };
        if received == 0 {
            return Err("the server closed the connection before the end of an answer".into());
        }
        self.inbox.filled(received);
        Ok(())
    }
}

fn silent() -> String {
    format!("no answer for {} s", PATIENCE.as_secs())
}

impl Shape {
    /// Returns the number of operations in each batch.
    fn sizes(self) -> impl Iterator<Item = usize> {
        let Shape { depth, batches } = self;
        let batches = batches.clamp(1, depth.max(1));
        (0..batches).map(move |batch| (depth / batches + u32::from(batch < depth % batches)) as usize)
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} x {}", self.batches, self.depth / self.batches.max(1))
    }
}

/// Operations that the client sends together.
struct Batch {
    size: usize,
    /// Operations of the batch, reads before writes.
    slots: Vec<Slot>,
    reads: usize,
}

/// An operation in flight, and its state.
struct Slot {
    drawn: Drawn,
    /// Whether the operation is a write, or a read-modify-write whose read is done.
    writes: bool,
    /// Whether the operation read a wrong value.
    wrong: bool,
    since: Option<Instant>,
}

impl Batch {
    fn new(size: usize) -> Batch {
        Batch { size, slots: Vec::with_capacity(size), reads: 0 }
    }

    /// Renews the batch after all its answers have arrived. A read-modify-write whose read was answered stays in the
    /// batch and is written next. All other operations are done, and new operations take their place.
    fn renew(
        &mut self,
        next: &mut impl FnMut() -> Option<Drawn>,
        drawn: &mut u64,
        done: &mut impl FnMut(&Slot),
    ) {
        self.slots.retain_mut(|slot| {
            let modifies = slot.drawn.operation == Operation::ReadModifyWrite && !slot.writes;
            slot.writes |= modifies;
            if !modifies {
                done(slot);
            }
            modifies
        });
        while self.slots.len() < self.size
            && let Some(next) = next()
        {
            let since = drawn.is_multiple_of(SAMPLED).then(Instant::now);
            *drawn += 1;
            let writes = next.operation == Operation::Update;
            self.slots.push(Slot { drawn: next, writes, wrong: false, since });
        }
        self.reads = self.slots.iter().filter(|slot| !slot.writes).count();
        if self.reads != self.slots.len() {
            self.slots.sort_by_key(|slot| slot.writes);
        }
    }
}

/// Buffer of received bytes that are not yet parsed.
#[derive(Default)]
struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Inbox {
    const SIZE: usize = 128 << 10;
    /// Maximum size of the buffer, in bytes. All answers to a batch fit, even if the server stops reading until its
    /// answers are read.
    const SIZE_MAX: usize = 16 << 20;
    /// Minimum free space for a read, in bytes.
    const ROOM: usize = 32 << 10;

    #[inline]
    fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    #[inline]
    fn take(&mut self, len: usize) {
        self.start = (self.start + len).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Returns the free space of the buffer, after enlarging the buffer if needed.
    fn place(&mut self) -> Result<&mut [u8], String> {
        if self.bytes.len() - self.end < Inbox::ROOM {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            if self.bytes.len() - self.end < Inbox::ROOM {
                if self.bytes.len() >= Inbox::SIZE_MAX {
                    return Err(format!("the server sent more than {} bytes at once", Inbox::SIZE_MAX));
                }
                self.bytes.resize((self.bytes.len() * 2).max(Inbox::SIZE), 0);
            }
        }
        Ok(&mut self.bytes[self.end..])
    }

    fn filled(&mut self, len: usize) {
        self.end += len;
    }
}

enum Link {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Link::Tcp(stream) => stream.as_fd(),
            Link::Unix(stream) => stream.as_fd(),
        }
    }
}

#[cfg(test)]
mod tests;
