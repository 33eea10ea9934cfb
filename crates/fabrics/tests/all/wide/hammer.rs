//! Threads that run chains on the same few wide words, and check that no word was torn or overwritten.
//!
//! Each word has four parts of 8 bytes. Threads change them as follows:
//!
//! ```text
//! COUNTED   | n | n | n | n |        CAS of 32 bytes, from n to n + 1; read in every way
//! MIXED     | n | n | n | added |    CAS of 24 bytes, or of 32 that keeps the last 8; FETCH-ADD on the last 8
//! WRITTEN   | n | n | n | n |        WRITE of 32 bytes
//! PAIRED    | n | n | m | m |        CAS of 16 bytes on one half, or of 32 that adds one to all parts
//! ```

use farside_fabrics::memory::{Mapping, Pages, Wide};
use farside_remote::arena::session::SessionId;
use farside_remote::arena::{Geometry, segment::Use};
use farside_remote::op::Op;
use farside_remote::{Addr, By, ChainBuf, Key, Memory, Mode, Reply, Status};
use farside_remote::{cas, cas_from, fetch_add, read, run, write};
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, IntoBytes};

const KEY: Key = Key::new(1, 0xfeed);
const BY: By = By::itself(SessionId { slot: 0, number: 1 });

const COUNTED: u64 = 32;
const MIXED: u64 = 64;
const WRITTEN: u64 = 128;
const PAIRED: u64 = 160;
/// Address of a pointer to the word `COUNTED`.
const POINTER: u64 = 256;
/// Start of the threads' private areas, each of 64 bytes.
const OWN: u64 = 4096;

/// Outcome of a run.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Number of words whose parts had different values.
    pub(crate) torn: AtomicU64,
    /// Number of exchanges that another exchange or addition has overwritten.
    pub(crate) lost: AtomicU64,
    /// Number of exchanges whose comparison failed.
    pub(crate) failed: AtomicU64,
    /// Number of exchanges done.
    pub(crate) swapped: AtomicU64,
}

impl Outcome {
    pub(crate) fn is_sound(&self) -> bool {
        self.torn.load(Ordering::Relaxed) == 0 && self.lost.load(Ordering::Relaxed) == 0
    }
}

/// Creates a memory whose first segment is the table of region 1.
pub(crate) fn memory() -> Wide<Mapping> {
    let memory = Mapping::create(Geometry::SIZE_MIN, Pages::Small).expect("a small memory");
    let arena = memory.arena();
    let Ok(()) = arena.set_secret(KEY.region(), KEY.secret());
    let Ok(old) = arena.segment(0);
    let Ok(assigned) = arena.assign(0, old, KEY.region(), Use::Table);
    assert!(assigned);
    Wide::of(memory)
}

/// Starts `threads` threads. Each calls `begin`, then runs `turns` rounds of chains.
pub(crate) fn hammer(threads: u64, turns: u64, begin: fn()) -> Outcome {
    let (memory, outcome) = (memory(), Outcome::default());
    let (mut counted, mut mixed, mut added) = (0, 0, 0);
    let table = memory.geometry().segment_at(0);
    let Ok(()) = memory.write(table + POINTER, (table + COUNTED).as_bytes());
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|number| {
                let (memory, outcome) = (&memory, &outcome);
                scope.spawn(move || {
                    begin();
                    let mut worker = Worker::new(memory, outcome, number);
                    (0..turns).for_each(|turn| worker.turn(turn));
                    (worker.counted, worker.mixed, worker.added)
                })
            })
            .collect();
        for worker in workers {
            let done = worker.join().expect("a worker records errors, and does not panic");
            counted += done.0;
            mixed += done.1;
            added += done.2;
        }
    });
    let mut worker = Worker::new(&memory, &outcome, 0);
    let ends = [worker.words(COUNTED)[0], worker.words(MIXED)[0], worker.words(MIXED)[3]];
    let lost = [counted, mixed, added].iter().zip(ends).filter(|(done, end)| **done != end.get()).count();
    outcome.lost.fetch_add(lost as u64, Ordering::Relaxed);
    outcome
}

type Words = [U64; 4];

struct Worker<'a> {
    memory: &'a Wide<Mapping>,
    outcome: &'a Outcome,
    table: Addr,
    own: Addr,
    number: u64,
    chain: ChainBuf,
    reply: Reply,
    counted: u64,
    mixed: u64,
    added: u64,
}

impl<'a> Worker<'a> {
    fn new(memory: &'a Wide<Mapping>, outcome: &'a Outcome, number: u64) -> Worker<'a> {
        let table = Addr::new(memory.geometry().segment_at(0));
        let own = table.plus(OWN + 64 * number);
        let (chain, reply) = (ChainBuf::new(), Reply::new());
        Worker { memory, outcome, table, own, number, chain, reply, counted: 0, mixed: 0, added: 0 }
    }

    fn turn(&mut self, turn: u64) {
        let way = (turn + self.number) % 8;
        let seen = self.read_counted(way);
        self.see(seen);
        self.count(seen, way.is_multiple_of(2));
        self.mix(way);
        let fill = U64::new(self.number << 32 | turn);
        self.ask(write(self.table.plus(WRITTEN), [fill; 4].as_bytes()));
        let written = self.words(WRITTEN);
        self.see(written);
        self.pair(way);
    }

    /// Reads `COUNTED` in one of several ways: with various lengths and offsets, through a pointer, or by a copy within
    /// the node.
    fn read_counted(&mut self, way: u64) -> Words {
        let at = self.table.plus(COUNTED);
        match way {
            0 => self.ask(read(self.table.plus(POINTER), 32).indirect()),
            1 => {
                self.ask(read(self.table.plus(COUNTED - 5), 4096));
                return first_words(&self.reply.output(0)[5..]);
            }
            2 => {
                self.ask(
                    read(self.table.plus(COUNTED - 16), 1024)
                        .redirect(self.table.plus(8192 + 2048 * self.number)),
                );
                self.ask(read(self.table.plus(8192 + 16 + 2048 * self.number), 32));
            }
            3 => {
                self.ask(read(at, 32).redirect(self.own));
                self.ask(read(self.own, 32));
            }
            _ => self.ask(read(at, 32)),
        }
        first_words(self.reply.output(0))
    }

    /// Adds one to the value read. The operand is in the op, or in memory.
    fn count(&mut self, seen: Words, from_memory: bool) {
        let (at, next) = (self.table.plus(COUNTED), next(seen));
        let swapped = if from_memory {
            self.ask(write(self.own, next.as_bytes()));
            self.swaps(cas_from(at, &seen, self.own))
        } else {
            self.swaps(cas(Mode::Eq, at, &seen, &next))
        };
        self.counted += u64::from(swapped);
    }

    fn mix(&mut self, way: u64) {
        let at = self.table.plus(MIXED);
        let seen = self.words(MIXED);
        self.see([seen[0], seen[0], seen[1], seen[2]]);
        let next = next(seen);
        let (old, new) = (seen.first_chunk::<3>().expect("four"), next.first_chunk::<3>().expect("four"));
        let mask = [U64::new(u64::MAX), U64::new(u64::MAX), U64::new(u64::MAX), U64::ZERO];
        let swapped = match way % 2 {
            0 => self.swaps(cas(Mode::Eq, at, old, new)),
            _ => self.swaps(cas(Mode::Eq, at, &seen, &next).masked(&mask, &mask)),
        };
        self.mixed += u64::from(swapped);
        self.ask(fetch_add(at.plus(24), &U64::new(1)));
        self.added += 1;
    }

    /// Changes both halves of `PAIRED` with one exchange, or one half with an exchange of its own.
    fn pair(&mut self, way: u64) {
        let at = self.table.plus(PAIRED);
        let seen = self.words(PAIRED);
        let next = next(seen);
        let [low, high]: [[U64; 2]; 2] = [[seen[0], seen[1]], [seen[2], seen[3]]];
        self.see([low[0], low[1], low[0], low[1]]);
        self.see([high[0], high[1], high[0], high[1]]);
        match way % 3 {
            0 => drop(self.swaps(cas(Mode::Eq, at, &low, &[next[0], next[1]]))),
            1 => drop(self.swaps(cas(Mode::Eq, at.plus(16), &high, &[next[2], next[3]]))),
            _ => drop(self.swaps(cas(Mode::Eq, at, &seen, &next))),
        }
    }

    fn words(&mut self, offset: u64) -> Words {
        self.ask(read(self.table.plus(offset), 32));
        first_words(self.reply.output(0))
    }

    /// Counts the word as torn if its parts differ.
    fn see(&mut self, words: Words) {
        let torn = words.iter().any(|word| *word != words[0]);
        self.outcome.torn.fetch_add(u64::from(torn), Ordering::Relaxed);
    }

    fn swaps<T: ?Sized>(&mut self, op: Op<'_, T>) -> bool {
        self.ask(op);
        let swapped = self.reply.last_status() == Status::Ok;
        let tally = if swapped { &self.outcome.swapped } else { &self.outcome.failed };
        tally.fetch_add(1, Ordering::Relaxed);
        swapped
    }

    /// Runs a chain of one op.
    fn ask<T: ?Sized>(&mut self, op: Op<'_, T>) {
        let mut buf = std::mem::take(&mut self.chain);
        let mut chain = buf.begin(KEY);
        let _ = chain.also(op);
        let Ok(()) = run(self.memory, BY, chain.view(), &mut self.reply);
        assert_eq!(self.reply.verdict(), Status::Ok, "{:?}", self.reply);
        self.chain = buf;
    }
}

fn next(words: Words) -> Words {
    words.map(|word| U64::new(word.get().wrapping_add(1)))
}

fn first_words(bytes: &[u8]) -> Words {
    let (words, _) = Words::read_from_prefix(bytes).expect("32 bytes were read");
    words
}
