//! A memory that interrupts a chain at every access, by returning *wait*. The driver performs the access on shared
//! bytes, one cache line at a time in random order. Between two lines other clients may run. Then the driver records
//! the access's result, and runs the chain again from its start, with the recorded results.
//!
//! Invariant: a repeated run makes the recorded accesses in the recorded order; otherwise the memory panics.

use super::Bytes;
use farside_remote::arena::Geometry;
use farside_remote::draws::Draws;
use farside_remote::{By, ChainView, Key, Memory, Reply, Rights, Width, run};
use std::cell::Cell;

/// Number of bytes that are copied atomically.
const LINE: u64 = 64;

/// One access of a chain to memory, or to its key's rights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Admits(Key),
    Reach { region: u32, at: u64, len: u64 },
    Read { at: u64, len: usize },
    Write { at: u64, bytes: Vec<u8> },
    Load { at: u64, width: Width },
    Exchange { at: u64, width: Width, old: u128, new: u128 },
    ExchangeWide { at: u64, old: Vec<u8>, new: Vec<u8> },
}

#[derive(Clone, Debug)]
enum Answer {
    Admitted(Rights),
    Reached(u64),
    Bytes(Vec<u8>),
    Written,
    Word(u128),
    Exchanged(Result<(), u128>),
    ExchangedWide { swapped: bool, old: Vec<u8> },
}

/// A memory that returns the recorded results. The first access beyond them returns *wait*.
struct Replay<'a> {
    geometry: Geometry,
    log: &'a [(Access, Answer)],
    next: Cell<usize>,
}

impl Replay<'_> {
    fn ask(&self, access: Access) -> Result<&Answer, Access> {
        let Some((asked, answer)) = self.log.get(self.next.get()) else { return Err(access) };
        assert_eq!(*asked, access, "a replayed run made another access");
        self.next.set(self.next.get() + 1);
        Ok(answer)
    }
}

impl Memory for Replay<'_> {
    type Wait = Access;

    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn admits(&self, key: Key) -> Result<Rights, Access> {
        let Answer::Admitted(rights) = self.ask(Access::Admits(key))? else { unreachable!() };
        Ok(*rights)
    }
    fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, Access> {
        let Answer::Reached(reach) = self.ask(Access::Reach { region, at, len })? else { unreachable!() };
        Ok(*reach)
    }
    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Access> {
        let Answer::Bytes(bytes) = self.ask(Access::Read { at, len: out.len() })? else { unreachable!() };
        out.copy_from_slice(bytes);
        Ok(())
    }
    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Access> {
        self.ask(Access::Write { at, bytes: bytes.to_vec() }).map(|_| ())
    }
    fn load(&self, at: u64, width: Width) -> Result<u128, Access> {
        let Answer::Word(word) = self.ask(Access::Load { at, width })? else { unreachable!() };
        Ok(*word)
    }
    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, Access> {
        let Answer::Exchanged(done) = self.ask(Access::Exchange { at, width, old, new })? else {
            unreachable!()
        };
        Ok(*done)
    }
    fn is_wide(&self) -> bool {
        true
    }
    fn exchange_wide(&self, at: u64, old: &mut [u8], new: &[u8]) -> Result<bool, Access> {
        let asked = Access::ExchangeWide { at, old: old.to_vec(), new: new.to_vec() };
        let Answer::ExchangedWide { swapped, old: now } = self.ask(asked)? else { unreachable!() };
        old.copy_from_slice(now);
        Ok(*swapped)
    }
}

/// Runs chains on `bytes`, one access at a time. Calls `between` with the number of completed accesses: before every
/// access, and between the cache lines of an access.
pub(crate) struct Tearing<'a, F> {
    bytes: &'a Bytes,
    random: Draws,
    between: F,
    log: Vec<(Access, Answer)>,
}

impl<'a, F: FnMut(&Bytes, usize)> Tearing<'a, F> {
    pub(crate) fn new(bytes: &'a Bytes, seed: u64, between: F) -> Tearing<'a, F> {
        Tearing { bytes, random: Draws(seed), between, log: Vec::new() }
    }

    /// Runs a chain. Returns each of its accesses once, in order.
    pub(crate) fn run(mut self, by: By, chain: ChainView<'_>, reply: &mut Reply) -> Vec<Access> {
        loop {
            let replay = Replay { geometry: self.bytes.geometry(), log: &self.log, next: Cell::new(0) };
            match run(&replay, by, chain, reply) {
                Ok(()) => {
                    assert_eq!(
                        replay.next.get(),
                        self.log.len(),
                        "a replayed run made fewer accesses than before"
                    );
                    return self.log.into_iter().map(|(access, _)| access).collect();
                }
                Err(access) => {
                    let answer = self.perform(&access);
                    self.log.push((access, answer));
                }
            }
        }
    }

    fn perform(&mut self, access: &Access) -> Answer {
        (self.between)(self.bytes, self.log.len());
        let bytes = self.bytes;
        match *access {
            Access::Admits(key) => {
                let Ok(rights) = bytes.admits(key);
                Answer::Admitted(rights)
            }
            Access::Reach { region, at, len } => {
                let Ok(reach) = bytes.reach(region, at, len);
                Answer::Reached(reach)
            }
            Access::Read { at, len } => {
                let mut out = vec![0; len];
                for (from, to) in self.lines(at, len) {
                    out[from..to].copy_from_slice(&bytes.peek(at + from as u64, (to - from) as u64));
                    (self.between)(bytes, self.log.len());
                }
                Answer::Bytes(out)
            }
            Access::Write { at, bytes: ref new } => {
                for (from, to) in self.lines(at, new.len()) {
                    bytes.poke(at + from as u64, &new[from..to]);
                    (self.between)(bytes, self.log.len());
                }
                Answer::Written
            }
            Access::Load { at, width } => {
                let Ok(word) = bytes.load(at, width);
                Answer::Word(word)
            }
            Access::Exchange { at, width, old, new } => {
                let Ok(done) = bytes.exchange(at, width, old, new);
                Answer::Exchanged(done)
            }
            Access::ExchangeWide { at, ref old, ref new } => {
                let mut old = old.clone();
                let Ok(swapped) = bytes.exchange_wide(at, &mut old, new);
                Answer::ExchangedWide { swapped, old }
            }
        }
    }

    /// Splits an access into pieces that lie in one cache line each, in shuffled order.
    fn lines(&mut self, at: u64, len: usize) -> Vec<(usize, usize)> {
        let mut lines = Vec::new();
        let mut from = 0;
        while from < len {
            let to = (from + (LINE - (at + from as u64) % LINE) as usize).min(len);
            lines.push((from, to));
            from = to;
        }
        self.random.shuffle(&mut lines);
        lines
    }
}
