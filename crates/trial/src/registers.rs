//! Two protocols, as small as can be, that lean on what PRISM-KV does without: numbers that are compared, conditional
//! ops after one that was skipped, buffers that a chain reserves and does not take, scratch that begins with zeros.
//!
//! A *block* is a register as PRISM-RS keeps one at each replica (PRISM, section 7): a put gives its value a tag above
//! those that it has seen, and installs it where the tag is newer. An *entry* is claimed once, and whoever has claimed
//! it alone writes it.
//!
//! ```text
//! table   | block 16 bytes | ... | entry 32 bytes | ...
//! block   | tag u64, big-endian | address u64 |
//! tag     | counter 40 bits | writer 24 bits |
//! buffer  | tag u64, big-endian | bytes u64 | value |
//! entry   | who u64 | word u64 | check u64 | 0 u64 |
//! ```
//!
//! Invariant: no two puts have one tag. Invariant: an entry's check is written before its word.

use crate::family::{Failure, Family};
use crate::flight::{Phase, Phases, Request, Tracked};
use crate::kv::{Sizes, unknown_bytes};
use crate::systems::System;
use crate::{Choice, Drawn, Scene, values};
use farside_remote::arena::class::Class;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use farside_remote::op::cas_with;
use farside_remote::service::{Extent, Kind, Plan, Service};
use farside_remote::{
    Addr, ChainBuf, Fabric, FabricError, Key, Memory, Mode, NodeId, Reply, Status, Width, allocate, cas_from,
    read, read_as, write,
};
use farside_sim::history::register::{Ask, Outcome};
use farside_sim::linearizable::{self, Limits};
use farside_sim::random::Random;
use farside_systems::kv::KvError;
use farside_systems::store;
use std::time::Duration;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, big_endian};

pub(crate) const KIND: &str = "registers";
/// Blocks of a table. The key of a block is its number; that of an entry comes after all blocks.
const BLOCKS: u64 = 1024;
/// Entries of a table.
const ENTRIES: u64 = 64;

const BLOCK_SIZE: u64 = 16;
const ENTRY_SIZE: u64 = 32;
const HEADER_SIZE: usize = size_of::<Header>();
/// So much is read of a buffer: more than it has, so that only its end bounds it.
const READ_MAX: u32 = 1 << 12;

/// How often a put that finds no buffer asks again, and after how long.
const PAUSES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(1);

/// A block: its tag, and where its buffer is.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Block {
    tag: big_endian::U64,
    at: Addr,
}

/// Compares tags alone.
const TAG: Block = Block { tag: big_endian::U64::new(u64::MAX), at: Addr::NULL };
/// Swaps both.
const WHOLE: Block = Block { tag: big_endian::U64::new(u64::MAX), at: Addr::new(u64::MAX) };
/// Swaps nothing: a CAS that only compares.
const NOTHING: Block = Block { tag: big_endian::U64::new(0), at: Addr::NULL };

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    tag: big_endian::U64,
    len: U64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Entry {
    who: U64,
    word: U64,
    check: U64,
    reserved: U64,
}

const TMP: Addr = Addr::scratch(0);
const TMP_AT: Addr = Addr::scratch(8);

static PHASES: Phases = Phases {
    all: &[
        Phase::new("idle").rare(),
        Phase::new("look"),
        Phase::allocating("swing"),
        Phase::new("claim").rare(),
        Phase::new("catalog").rare(),
    ],
    of: |request, _| match request {
        Request::Call(_) => 4,
        Request::Chain(chain) => match (chain.allocates(), chain.atomics()) {
            (0, 0) => 1,
            (0, _) => 3,
            _ => 2,
        },
    },
};

/// Registers under trial.
pub(crate) struct Trial {
    sizes: Sizes,
}

impl Family for Trial {
    type Ask = Ask;
    type Client = Registers<Tracked>;
    type Checker = linearizable::Registers;

    const MAY_LIVE_AT_NODE: bool = true;

    fn drawn(_system: System, drawn: &Drawn, random: &Random) -> Trial {
        Trial { sizes: Sizes::drawn(drawn, None, random) }
    }

    fn options(&self) -> Vec<Choice> {
        self.sizes.options()
    }

    fn parameters(&self) -> String {
        String::new()
    }

    fn is_one_sided(&self) -> bool {
        true
    }

    fn phases(_system: System) -> &'static Phases {
        &PHASES
    }

    fn checker(&self) -> linearizable::Registers {
        linearizable::Registers(Limits::default())
    }

    async fn open(&self, fabric: Tracked, node: NodeId, name: &str) -> Result<Registers<Tracked>, Failure> {
        Ok(Registers::open(fabric, node, name).await?)
    }

    fn draw(&self, scene: &Scene, _client: &mut Registers<Tracked>) -> (u64, Ask) {
        let random = scene.world.random();
        let (block, entry) = (random.below(scene.drawn.keys), BLOCKS + random.below(ENTRIES));
        match random.below(16) {
            0..6 => (block, Ask::Get),
            6..12 => (block, Ask::Put(self.sizes.value(scene))),
            12..14 => (entry, Ask::Get),
            _ => (entry, Ask::PutIfAbsent(self.sizes.value(scene))),
        }
    }

    async fn perform(
        &self,
        _scene: &Scene,
        client: &mut Registers<Tracked>,
        who: u32,
        key: u64,
        ask: &Ask,
    ) -> Result<Outcome, Failure> {
        Ok(match (*ask, key.checked_sub(BLOCKS)) {
            (Ask::Get, None) => match client.get(key).await? {
                Some(bytes) => Outcome::Found(values::known(bytes).ok_or_else(|| unknown_bytes(key))?, None),
                None => Outcome::Absent,
            },
            (Ask::Get, Some(entry)) => match client.word(entry).await? {
                Some(word) => Outcome::Found(values::of_word(word), None),
                None => Outcome::Absent,
            },
            (Ask::Put(value), None) => {
                client.put(key, &values::bytes(value), value.tag).await?;
                Outcome::Done(None)
            }
            (Ask::PutIfAbsent(value), Some(entry)) => {
                match client.claim(entry, u64::from(who) + 1, values::word(value)).await? {
                    true => Outcome::Done(None),
                    // Another client has claimed it, and may not have written it yet, so this tells nothing.
                    false => Outcome::Failed,
                }
            }
            _ => unreachable!("registers are not asked for {ask}"),
        })
    }

    async fn trespass(&self, scene: &Scene, client: &mut Registers<Tracked>) -> Result<(), Failure> {
        if scene.world.random().one_in(16) {
            client.trespass().await?;
        }
        Ok(())
    }

    fn look_at_all(&self, scene: &Scene) -> Vec<(u64, Ask)> {
        (0..scene.drawn.keys).chain(BLOCKS..BLOCKS + ENTRIES).map(|key| (key, Ask::Get)).collect()
    }
}

/// A client of one store of registers.
pub(crate) struct Registers<F> {
    fabric: F,
    node: NodeId,
    key: Key,
    at: u64,
    chain: ChainBuf,
    reply: Reply,
}

/// Where in a block its buffer's address is.
const AT_OFFSET: u32 = std::mem::offset_of!(Block, at) as u32;

impl<F: Fabric + Clock> Registers<F> {
    async fn open(fabric: F, node: NodeId, name: &str) -> Result<Registers<F>, KvError> {
        let Extent { key, at, .. } = store::fetch_of(&fabric, node, name, KIND).await?.extent();
        Ok(Registers { fabric, node, key, at, chain: ChainBuf::new(), reply: Reply::new() })
    }

    /// The value of a block, if it was ever put.
    async fn get(&mut self, block: u64) -> Result<Option<&[u8]>, KvError> {
        let at = self.block(block);
        let mut chain = self.chain.begin(self.key);
        chain.also(read(at, BLOCK_SIZE as u32).redirect(TMP));
        let block = chain.then(read_as::<Block>(TMP));
        let buffer = chain.then(read(TMP_AT, READ_MAX).indirect());
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        let block = self.reply.get(block).map_err(KvError::Refused)?;
        if block.at.is_null() {
            return Ok(None);
        }
        let bytes = self.reply.get(buffer).map_err(KvError::Refused)?;
        let (header, value) = Header::ref_from_prefix(bytes).map_err(|_| SHORT)?;
        if header.tag != block.tag {
            return Err(KvError::Damaged("a block's buffer has another tag"));
        }
        let len = header.len.get() as usize;
        let class = Class::for_len(HEADER_SIZE + len).ok_or(SHORT)?;
        if bytes.len() != (class.size as usize).min(READ_MAX as usize) {
            return Err(KvError::Damaged("a READ has not ended where its buffer does"));
        }
        value.get(..len).map(Some).ok_or(SHORT)
    }

    /// Puts a value into a block; `writer` is nobody else's.
    async fn put(&mut self, block: u64, value: &[u8], writer: u64) -> Result<(), KvError> {
        let at = self.block(block);
        let mut chain = self.chain.begin(self.key);
        let seen = chain.also(read_as::<big_endian::U64>(at));
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(of_look)?;
        let seen = self.reply.get(seen).map_err(KvError::Refused)?.get();
        // Odd, so no two have one; and later ones are not greater.
        let writer = writer.wrapping_mul(0x9e37_79b1) & 0xff_ffff;
        let tag = big_endian::U64::new(((seen >> 24) + 1) << 24 | writer);

        let header = Header { tag, len: U64::new(value.len() as u64) };
        let list = Class::for_len(HEADER_SIZE + value.len()).expect("values are short").list();
        let mut chain = self.chain.begin(self.key);
        chain.also(write(TMP, tag.as_bytes()));
        // Who is late already takes no buffer.
        chain.then(cas_with::<Block>(Mode::Lt, at, TMP).masked(&TAG, &NOTHING));
        chain.then(allocate(list, [header.as_bytes(), value, &[]]).redirect(TMP_AT));
        let swing = cas_with::<Block>(Mode::Lt, at, TMP).masked(&TAG, &WHOLE).reclaiming(AT_OFFSET);
        let swung = chain.then(swing);
        let fresh = chain.also(read_as::<Addr>(TMP_AT));
        for _ in 0..PAUSES {
            self.fabric.run(self.node, &chain, &mut self.reply).await?;
            if self.reply.last_status() != Status::NotReady {
                break;
            }
            self.fabric.sleep(PAUSE).await;
        }
        match self.reply.status(swung) {
            // If a newer one is there, this counts as put just before it.
            Status::Ok | Status::CasFailed => Ok(()),
            // It took none, and scratch was all zeros.
            Status::Skipped if self.reply.get(fresh).is_ok_and(|fresh| fresh.is_null()) => Ok(()),
            Status::Skipped => Err(KvError::Damaged("scratch held what no op has put there")),
            Status::NotReady => Err(KvError::OutOfMemory),
            _ => Err(KvError::Refused(self.reply.verdict())),
        }
    }

    /// Claims an entry for `who` and writes its word, neither of which is 0; false if it was claimed before.
    async fn claim(&mut self, entry: u64, who: u64, word: u64) -> Result<bool, KvError> {
        let (at, who) = (self.entry(entry), U64::new(who));
        let [word, check] = [U64::new(word), U64::new(check(who.get(), word))];
        let mut chain = self.chain.begin(self.key);
        chain.also(write(TMP, who.as_bytes()));
        // The other half of what it installs is the zeros of scratch: no word yet.
        let claimed = chain.then(cas_from(Addr::new(at), &[0u8; 16], TMP));
        chain.then(write(Addr::new(at + 16), check.as_bytes()));
        chain.then(write(Addr::new(at + 8), word.as_bytes()));
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        match (self.reply.status(claimed), self.reply.last_status()) {
            (Status::CasFailed, _) => Ok(false),
            (Status::Ok, Status::Ok) => Ok(true),
            _ => Err(KvError::Refused(self.reply.verdict())),
        }
    }

    /// The word of an entry, if one is written.
    async fn word(&mut self, entry: u64) -> Result<Option<u64>, KvError> {
        let at = self.entry(entry);
        let mut chain = self.chain.begin(self.key);
        let first = chain.also(read_as::<U64>(Addr::new(at + 8)));
        let entry = chain.then(read_as::<Entry>(Addr::new(at)));
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        if self.reply.get(first).map_err(KvError::Refused)?.get() == 0 {
            return Ok(None);
        }
        let Entry { who, word, check: told, .. } = *self.reply.get(entry).map_err(KvError::Refused)?;
        if told.get() != check(who.get(), word.get()) {
            return Err(KvError::Damaged("an entry was written by two"));
        }
        Ok(Some(word.get()))
    }

    /// Follows a pointer out of the store, which nobody may.
    async fn trespass(&mut self) -> Result<(), KvError> {
        /// In the node's own header.
        const ELSEWHERE: Addr = Addr::new(8);
        let mut chain = self.chain.begin(self.key);
        chain.also(write(TMP, ELSEWHERE.as_bytes()));
        let found = chain.then(read_as::<U64>(TMP).indirect());
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        match self.reply.get(found) {
            Ok(_) => Err(KvError::Damaged("a pointer was followed to where the key opens nothing")),
            Err(_) => Ok(()),
        }
    }

    fn block(&self, block: u64) -> Addr {
        assert!(block < BLOCKS, "there is no block {block}");
        Addr::new(self.at + block * BLOCK_SIZE)
    }

    fn entry(&self, entry: u64) -> u64 {
        assert!(entry < ENTRIES, "there is no entry {entry}");
        self.at + BLOCKS * BLOCK_SIZE + entry * ENTRY_SIZE
    }
}

const SHORT: KvError = KvError::Damaged("a block's buffer is shorter than its value");

/// A put that has only looked was not carried out.
fn of_look(error: FabricError) -> KvError {
    match error {
        FabricError::Lost { node, reason, .. } => {
            KvError::Fabric(FabricError::Lost { node, ran: Ran::No, reason })
        }
        other => KvError::Fabric(other),
    }
}

/// What proves that word and claim are one client's.
fn check(who: u64, word: u64) -> u64 {
    (who ^ word.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Registers, as a node knows them.
pub(crate) struct RegistersKind;

impl<M: Memory> Kind<M> for RegistersKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn plan(&self, parameters: &str, _quota: u64, _entropy: u64) -> Result<Plan, String> {
        let table_len = BLOCKS * BLOCK_SIZE + ENTRIES * ENTRY_SIZE;
        Ok(Plan { table_len, parameters: parameters.to_owned(), wide: false })
    }

    fn serve(&self, _parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(Table { at: table.at }))
    }
}

struct Table {
    at: u64,
}

impl<M: Memory> Service<M> for Table {
    fn live(&self, memory: &M, cursor: u64, found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        const PER_STEP: u64 = 16;
        for block in cursor..cursor + PER_STEP {
            let word = memory.load(self.at + block * BLOCK_SIZE, Width::W16)?;
            let block = Block::read_from_bytes(&word.to_le_bytes()).expect("it has a block's size");
            if !block.at.is_null() {
                found.push(block.at.raw());
            }
        }
        let next = cursor + PER_STEP;
        Ok((next < BLOCKS).then_some(next))
    }
}
