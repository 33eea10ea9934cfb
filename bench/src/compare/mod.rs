//! Rivals: other stores, driven through the workload that [`crate::driver`] drives ours through.
//!
//! * [`redis`], [`memcached`]: what each says over a socket, as functions from bytes to answers.
//! * [`Client`]: one connection with so many operations under way, in one to four batches. A batch leaves in one
//!   write; when all of its answers have come, the next takes its place. With more than one, client and server work at
//!   the same time.
//! * [`lmdb`]: a library, so there is nobody to ask.
//! * [`rows`]: what came of it, for people and scripts.
//! * [`benchmark`]: what a rival's own benchmark says.
//!
//! Invariant: operations, keys and values are drawn and looked at by the code that does it for ours.
//! Invariant: what a server answers is input: whatever it is, it is taken for an answer or is an error that shows it,
//! and no more than [`ANSWER_BYTES_MAX`] of one are kept.

pub mod benchmark;
#[cfg(feature = "lmdb")]
pub mod lmdb;
pub mod memcached;
pub mod redis;
pub mod rows;
mod words;

use crate::kv::{Drawn, KvTrouble, Thread, fill, looks_right};
use crate::workload::{Operation, Workload};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::cell::Cell;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The longest answer to one request that is taken in.
pub const ANSWER_BYTES_MAX: usize = 1 << 20;
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Looks at a socket between two looks at the clock.
const LOOKS: u32 = 4096;
/// One latency is taken in so many operations: one more than our own driver's, so that it is another place of each
/// batch.
const SAMPLED: u64 = 65;
/// Records that are under way while a store is loaded.
const LOADING: Shape = Shape { depth: 256, batches: 2 };

/// What a rival's clients and server say to each other.
///
/// Of a batch all reads are asked before all writes, and are answered so.
pub trait Dialect {
    /// Asks who the server is.
    const HELLO: &'static [u8];

    /// The process that `bytes` say to be the server's, once they are all that [`Dialect::HELLO`] is answered with.
    ///
    /// # Errors
    /// They are something else.
    fn pid(bytes: &[u8]) -> Result<Option<u32>, String>;

    /// Appends what asks for these records.
    fn ask_reads(keys: &[u64], out: &mut Vec<u8>);

    /// Appends what stores a record, and asks for a word that it did.
    fn ask_write(key: u64, value: &[u8], out: &mut Vec<u8>);

    /// How many bytes come before the answers to `count` reads; nothing if more must come first.
    ///
    /// # Errors
    /// This is another answer.
    #[inline]
    fn before_reads(_bytes: &[u8], _count: usize) -> Result<Option<usize>, String> {
        Ok(Some(0))
    }

    /// The answer to a read of `key`, with which `bytes` begin, and how many it has; nothing if more must come first.
    ///
    /// # Errors
    /// This is no answer to a read.
    fn read(bytes: &[u8], key: u64) -> Result<Option<Answer<'_>>, String>;

    /// How many bytes come after the answers to reads.
    ///
    /// # Errors
    /// This is another answer.
    #[inline]
    fn after_reads(_bytes: &[u8]) -> Result<Option<usize>, String> {
        Ok(Some(0))
    }

    /// How many bytes tell of a record that is stored.
    ///
    /// # Errors
    /// It was not.
    fn written(bytes: &[u8]) -> Result<Option<usize>, String>;
}

/// What a read was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer<'b> {
    /// Bytes of the whole answer.
    pub len: usize,
    /// Nothing if there is no such record.
    pub value: Option<&'b [u8]>,
}

/// Where a server listens.
#[derive(Clone, Debug)]
pub enum Address {
    /// Over TCP.
    Tcp(SocketAddr),
    /// At a unix socket.
    Unix(PathBuf),
}

/// How a client waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// It asks the kernel to be woken.
    Asleep,
    /// It looks at its socket all the time.
    Awake,
}

/// How many operations are under way, in how many batches. A batch has one at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Operations.
    pub depth: u32,
    /// Batches.
    pub batches: u32,
}

/// One connection to a server.
pub struct Client<D: Dialect> {
    link: Link,
    waiting: Waiting,
    inbox: Inbox,
    out: Vec<u8>,
    keys: Vec<u64>,
    value: Vec<u8>,
    dialect: std::marker::PhantomData<D>,
}

/// Whether rivals can be driven through a workload.
///
/// # Errors
/// It has operations that no rival is asked for here.
pub fn check(workload: &Workload) -> Result<(), String> {
    for operation in [Operation::Insert, Operation::Scan] {
        if workload.mix.share(operation) > 0.0 {
            return Err(format!(
                "workload {} has operations of the kind '{operation}', which are not compared here: choose a, b, c or \
                 f, or a file that only reads, updates and modifies",
                workload.name
            ));
        }
    }
    Ok(())
}

impl<D: Dialect> Client<D> {
    /// Connects. Values have `value_size` bytes.
    ///
    /// # Errors
    /// Nobody listens there.
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

    /// The server's process, as it tells.
    ///
    /// # Errors
    /// It does not tell.
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

    /// Stores the records of these numbers, and tells of each.
    ///
    /// # Errors
    /// One was not stored, and why.
    pub fn load(
        &mut self,
        mut numbers: impl Iterator<Item = u64>,
        mut progress: impl FnMut(),
    ) -> Result<(), String> {
        let next = || numbers.next().map(|key| Drawn { key, operation: Operation::Update });
        self.drive(LOADING, next, |_| progress())
    }

    /// Does what `thread` has drawn, for as long as `goes_on`.
    ///
    /// # Errors
    /// The server refused an operation, hung up, or said what cannot be understood.
    pub fn work(&mut self, thread: &Thread, shape: Shape, goes_on: impl Fn() -> bool) -> Result<(), String> {
        let doubt = Cell::new(0);
        let next = || (goes_on() && thread.may_begin()).then(|| thread.draw(doubt.take()));
        let done = |slot: &Slot| {
            doubt.set(usize::from(slot.wrong));
            if slot.wrong {
                thread.blame(&KvTrouble::Wrong(slot.drawn.key));
            }
            thread.count(slot.drawn, slot.since);
        };
        self.drive(shape, next, done)
    }

    /// Keeps so many operations under way until there is no next one, and all are done.
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
            self.ask(batch)?;
        }
        while batches.iter().any(|batch| !batch.slots.is_empty()) {
            for batch in batches.iter_mut().filter(|batch| !batch.slots.is_empty()) {
                self.hear(batch)?;
                batch.renew(&mut next, &mut drawn, &mut done);
                self.ask(batch)?;
            }
        }
        Ok(())
    }

    /// Sends what a batch asks.
    fn ask(&mut self, batch: &Batch) -> Result<(), String> {
        let (reads, writes) = batch.slots.split_at(batch.reads);
        self.out.clear();
        if !reads.is_empty() {
            self.keys.clear();
            self.keys.extend(reads.iter().map(|slot| slot.drawn.key));
            D::ask_reads(&self.keys, &mut self.out);
        }
        for slot in writes {
            fill(slot.drawn.key, &mut self.value);
            D::ask_write(slot.drawn.key, &self.value, &mut self.out);
        }
        self.send()
    }

    /// Takes in all that a batch is answered.
    fn hear(&mut self, batch: &mut Batch) -> Result<(), String> {
        let (reads, writes) = batch.slots.split_at_mut(batch.reads);
        if !reads.is_empty() {
            let count = reads.len();
            self.pass(|bytes| D::before_reads(bytes, count))?;
            for slot in reads {
                slot.wrong = self.hear_value(slot.drawn.key)?;
            }
            self.pass(D::after_reads)?;
        }
        writes.iter().try_for_each(|_| self.pass(D::written))
    }

    /// Whether the value that comes next is wrong.
    #[inline]
    fn hear_value(&mut self, key: u64) -> Result<bool, String> {
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

    /// Goes on after what `expected` knows.
    #[inline]
    fn pass(&mut self, expected: impl Fn(&[u8]) -> Result<Option<usize>, String>) -> Result<(), String> {
        loop {
            if let Some(len) = expected(self.inbox.bytes())? {
                self.inbox.take(len);
                return Ok(());
            }
            self.receive()?;
        }
    }

    /// Sends all of `out`. A server that reads nothing before its answers are read has them read meanwhile.
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
                Err(error) => return Err(format!("the connection broke: {error}")),
            }
        }
        Ok(())
    }

    /// Waits for bytes, and takes in what there are.
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
                Err(error) => return Err(format!("the connection broke: {error}")),
            }
        };
        if received == 0 {
            return Err("it hung up in the middle of an answer".into());
        }
        self.inbox.filled(received);
        Ok(())
    }
}

fn silent() -> String {
    format!("it has answered nothing for {} s", PATIENCE.as_secs())
}

impl Shape {
    /// How many operations each batch has.
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

/// Operations that are asked together.
struct Batch {
    size: usize,
    /// Reads first.
    slots: Vec<Slot>,
    reads: usize,
}

/// An operation under way.
struct Slot {
    drawn: Drawn,
    /// It is being written; what is modified was read before.
    writes: bool,
    /// What it read was wrong.
    wrong: bool,
    since: Option<Instant>,
}

impl Batch {
    fn new(size: usize) -> Batch {
        Batch { size, slots: Vec::with_capacity(size), reads: 0 }
    }

    /// After everything was answered: what has been read to be modified is written next, the rest is done, and others
    /// take its place.
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

/// What has arrived and was not looked at.
#[derive(Default)]
struct Inbox {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Inbox {
    const SIZE: usize = 128 << 10;
    /// More than the answers to a batch are, even where a server reads nothing until they are read.
    const SIZE_MAX: usize = 16 << 20;
    /// Room that a read has at least.
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

    /// Where more can be put.
    fn place(&mut self) -> Result<&mut [u8], String> {
        if self.bytes.len() - self.end < Inbox::ROOM {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            if self.bytes.len() - self.end < Inbox::ROOM {
                if self.bytes.len() >= Inbox::SIZE_MAX {
                    return Err(format!("it has answered more than {} bytes at once", Inbox::SIZE_MAX));
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
