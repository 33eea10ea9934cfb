//! Two minimal protocols for the features of chains that PRISM-KV does not use: comparison of numbers, conditional ops
//! after a skipped op, buffers that a chain reserves and does not take, and scratch that starts as zeros.
//!
//! A *block* is a register as each replica of PRISM-RS keeps it (PRISM, section 7). A put gives its value a tag that
//! is greater than the block's present tag. The put installs the value if the value's tag is still greater than the
//! block's tag. An *entry* is claimed once. Only the client that has claimed an entry writes it.
//!
//! ```text
//! table   | block 16 bytes | ... | entry 32 bytes | ...
//! block   | tag u64, big-endian | address u64 |
//! tag     | counter 40 bits | writer 24 bits |
//! buffer  | tag u64, big-endian | bytes u64 | value |
//! entry   | who u64 | word u64 | check u64 | 0 u64 |
//! ```
//!
//! Invariant: no two puts have the same tag.
//!
//! Invariant: an entry's check is written before its word.

use crate::family::{Failure, Family, Seat};
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
/// Number of blocks of a table. The key of a block in the history is its number. The keys of entries follow those of
/// the blocks.
const BLOCKS: u64 = 1024;
/// Number of entries of a table.
const ENTRIES: u64 = 64;

const BLOCK_SIZE: u64 = 16;
const ENTRY_SIZE: u64 = 32;
const HEADER_SIZE: usize = size_of::<Header>();
/// Maximum length in bytes of a READ of a buffer. Every buffer is shorter, so the READ ends at the buffer's end.
const READ_MAX: u32 = 1 << 12;

/// Maximum number of times that a put runs its chain while no buffer is free. The put waits for `PAUSE` after each
/// time.
const PAUSES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(1);

/// A block: its tag, and the address of the buffer that holds its value.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Block {
    tag: big_endian::U64,
    at: Addr,
}

/// Mask for a CAS that compares tags only.
const TAG: Block = Block { tag: big_endian::U64::new(u64::MAX), at: Addr::NULL };
/// Mask for a CAS that swaps tag and address.
const WHOLE: Block = Block { tag: big_endian::U64::new(u64::MAX), at: Addr::new(u64::MAX) };
/// Mask for a CAS that swaps nothing: the CAS only compares.
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
        Request::Call(..) => 4,
        Request::Chain(chain) => match (chain.allocates(), chain.atomics()) {
            (0, 0) => 1,
            (0, _) => 3,
            _ => 2,
        },
    },
};

/// The system of registers under trial.
pub(crate) struct Trial {
    sizes: Sizes,
}

impl Family for Trial {
    type Ask = Ask;
    type Client = Registers<Tracked>;
    type Shared = ();
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

    async fn open(
        &self,
        seat: Seat<'_, Trial>,
        node: NodeId,
        name: &str,
    ) -> Result<Registers<Tracked>, Failure> {
        Ok(Registers::open(seat.fabric(), node, name).await?)
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
                    // Another client has claimed the entry and may not have written its word yet. This operation does
                    // not learn the word.
                    false => Outcome::Failed,
                }
            }
            _ => unreachable!("registers have no operation {ask}"),
        })
    }

    async fn trespass(&self, scene: &Scene, client: &mut Registers<Tracked>) -> Result<(), Failure> {
        if scene.world.random().one_in(16) {
            client.trespass().await?;
        }
        Ok(())
    }

    fn read(&self) -> Option<Ask> {
        Some(Ask::Get)
    }

    fn read_all(&self, scene: &Scene) -> Vec<(u64, Ask)> {
        (0..scene.drawn.keys).chain(BLOCKS..BLOCKS + ENTRIES).map(|key| (key, Ask::Get)).collect()
    }
}

/// Client of a store of registers.
pub(crate) struct Registers<F> {
    fabric: F,
    node: NodeId,
    key: Key,
    at: u64,
    chain: ChainBuf,
    reply: Reply,
}

/// Offset in bytes of the buffer's address in a block.
const AT_OFFSET: u32 = std::mem::offset_of!(Block, at) as u32;

impl<F: Fabric + Clock> Registers<F> {
    async fn open(fabric: F, node: NodeId, name: &str) -> Result<Registers<F>, KvError> {
        let Extent { key, at, .. } = store::fetch_of(&fabric, node, name, KIND).await?.extent();
        Ok(Registers { fabric, node, key, at, chain: ChainBuf::new(), reply: Reply::new() })
    }

    /// Returns the value of a block, or `None` if no value was ever put into the block.
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
            return Err(KvError::Damaged("a block and its buffer have different tags"));
        }
        let len = header.len.get() as usize;
        let class = Class::for_len(HEADER_SIZE + len).ok_or(SHORT)?;
        if bytes.len() != (class.size as usize).min(READ_MAX as usize) {
            return Err(KvError::Damaged("a READ did not end at the end of its buffer"));
        }
        value.get(..len).map(Some).ok_or(SHORT)
    }

    /// Puts a value into a block. `writer` is different for each put.
    async fn put(&mut self, block: u64, value: &[u8], writer: u64) -> Result<(), KvError> {
        let at = self.block(block);
        let mut chain = self.chain.begin(self.key);
        let seen = chain.also(read_as::<big_endian::U64>(at));
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(of_look)?;
        let seen = self.reply.get(seen).map_err(KvError::Refused)?.get();
        // The multiplier is odd, so distinct writers stay distinct. It also makes later writers not always greater than
        // earlier ones.
        let writer = writer.wrapping_mul(0x9e37_79b1) & 0xff_ffff;
        let tag = big_endian::U64::new(((seen >> 24) + 1) << 24 | writer);

        let header = Header { tag, len: U64::new(value.len() as u64) };
        let list = Class::for_len(HEADER_SIZE + value.len()).expect("values are short").list();
        let mut chain = self.chain.begin(self.key);
        chain.also(write(TMP, tag.as_bytes()));
        // A put with an outdated tag takes no buffer.
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
            // After a failed CAS, a newer value is installed: this put took effect just before the newer value's put.
            Status::Ok | Status::CasFailed => Ok(()),
            // The put took no buffer, and scratch is still all zeros.
            Status::Skipped if self.reply.get(fresh).is_ok_and(|fresh| fresh.is_null()) => Ok(()),
            Status::Skipped => Err(KvError::Damaged("scratch held bytes that no op has written")),
            Status::NotReady => Err(KvError::OutOfMemory),
            _ => Err(KvError::Refused(self.reply.verdict())),
        }
    }

    /// Claims an entry for `who` and writes `word` to it. Neither `who` nor `word` may be 0. Returns false if the entry
    /// was already claimed.
    async fn claim(&mut self, entry: u64, who: u64, word: u64) -> Result<bool, KvError> {
        let (at, who) = (self.entry(entry), U64::new(who));
        let [word, check] = [U64::new(word), U64::new(check(who.get(), word))];
        let mut chain = self.chain.begin(self.key);
        chain.also(write(TMP, who.as_bytes()));
        // The CAS installs `who` and a second word from scratch. That word is zero, which means that the entry has no
        // word yet.
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

    /// Returns the word of an entry, or `None` if the word is not written yet.
    async fn word(&mut self, entry: u64) -> Result<Option<u64>, KvError> {
        let at = self.entry(entry);
        let mut chain = self.chain.begin(self.key);
        let first = chain.also(read_as::<U64>(Addr::new(at + 8)));
        let entry = chain.then(read_as::<Entry>(Addr::new(at)));
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        if self.reply.get(first).map_err(KvError::Refused)?.get() == 0 {
            return Ok(None);
        }
        let Entry { who, word, check: reported, .. } = *self.reply.get(entry).map_err(KvError::Refused)?;
        if reported.get() != check(who.get(), word.get()) {
            return Err(KvError::Damaged("two clients wrote an entry"));
        }
        Ok(Some(word.get()))
    }

    /// Tries to follow a pointer to memory outside the store. The node must deny this access.
    async fn trespass(&mut self) -> Result<(), KvError> {
        /// Address within the node's own header, which no key covers.
        const ELSEWHERE: Addr = Addr::new(8);
        let mut chain = self.chain.begin(self.key);
        chain.also(write(TMP, ELSEWHERE.as_bytes()));
        let found = chain.then(read_as::<U64>(TMP).indirect());
        self.fabric.run(self.node, &chain, &mut self.reply).await?;
        match self.reply.get(found) {
            Ok(_) => Err(KvError::Damaged("a pointer to memory that the key does not open was followed")),
            Err(_) => Ok(()),
        }
    }

    fn block(&self, block: u64) -> Addr {
        assert!(block < BLOCKS, "block {block} is out of range");
        Addr::new(self.at + block * BLOCK_SIZE)
    }

    fn entry(&self, entry: u64) -> u64 {
        assert!(entry < ENTRIES, "entry {entry} is out of range");
        self.at + BLOCKS * BLOCK_SIZE + entry * ENTRY_SIZE
    }
}

const SHORT: KvError = KvError::Damaged("a block's buffer is shorter than its value");

/// Converts an error of a put's first chain. This chain only reads, so the put was certainly not carried out.
fn of_look(error: FabricError) -> KvError {
    match error {
        FabricError::Lost { node, reason, .. } => {
            KvError::Fabric(FabricError::Lost { node, ran: Ran::No, reason })
        }
        other => KvError::Fabric(other),
    }
}

/// Returns the checksum of a claim and a word. The checksum proves that one client wrote both.
fn check(who: u64, word: u64) -> u64 {
    (who ^ word.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Node-side half of the registers.
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
            let block = Block::read_from_bytes(&word.to_le_bytes()).expect("a block has 16 bytes");
            if !block.at.is_null() {
                found.push(block.at.raw());
            }
        }
        let next = cursor + PER_STEP;
        Ok((next < BLOCKS).then_some(next))
    }
}
