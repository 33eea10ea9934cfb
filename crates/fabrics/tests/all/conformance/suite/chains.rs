//! Random chains of every op with every modifier, over a table of words, pointers and noise. The node decides when a
//! retired buffer is used again, so the model cannot predict which buffer an ALLOCATE after a retirement takes.
//! Therefore the table never contains the address of a buffer, and no chain both allocates and reclaims.
//!
//! ```text
//! table   | 64 pointers, 16 bytes each | noise |
//! ```
//!
//! A pointer is null, invalid, or points into the noise or at the end of the table.

use farside_remote::control::Store;
use farside_remote::draws::Draws;
use farside_remote::op::{ListId, Op, cas_with, write_from};
use farside_remote::{Addr, BoundedPtr, Chain, Mode};
use farside_remote::{allocate, cas, cas_from, fetch_add, read, retire, write};
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

const POINTERS: u64 = 64;
const POINTER_SIZE: u64 = size_of::<BoundedPtr>() as u64;
/// Number of bytes of the table that chains use.
pub(crate) const WORKED: u64 = 8192;
const OPS_MAX: u64 = 6;

/// Operands that the ops of a chain borrow.
pub(crate) struct Operands {
    bytes: Vec<u8>,
    words: Vec<U64>,
    wide: Vec<[U64; 2]>,
    /// Addresses that no buffer has.
    garbage: Vec<Addr>,
}

impl Operands {
    pub(crate) fn draw(store: &Store, random: &mut Draws) -> Operands {
        let bytes = (0..1024).map(|_| random.next() as u8).collect();
        // Few distinct values, so that comparisons succeed and fail about equally often.
        let mut word = || U64::new([0, 1, 2, 255, 256, u64::MAX][random.below(6) as usize]);
        let words: Vec<U64> = (0..16).map(|_| word()).collect();
        let wide = (0..16).map(|_| [word(), word()]).collect();
        let garbage = (0..40).map(|_| place(store, random)).collect();
        Operands { bytes, words, wide, garbage }
    }

    fn garbage(&self, random: &mut Draws) -> &[Addr] {
        &self.garbage[..[0, 1, 2, 40][random.below(4) as usize]]
    }

    fn bytes(&self, random: &mut Draws) -> &[u8] {
        let len = [0, 1, 7, 8, 16, 33, 255, 256, 700][random.below(9) as usize];
        let from = random.below((self.bytes.len() - len) as u64) as usize;
        &self.bytes[from..from + len]
    }
}

/// Returns the bytes of the initial pointers of the table.
pub(crate) fn pointers(store: &Store, random: &mut Draws) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..POINTERS {
        let ptr = match random.below(8) {
            0 => Addr::NULL,
            1 => Addr::new(store.table_at + store.table_len - 24),
            2 => Addr::new(64),
            _ => Addr::new(store.table_at + POINTERS * POINTER_SIZE + 8 * random.below(256)),
        };
        let bound = [0, 1, 16, 100, 1000][random.below(5) as usize];
        bytes.extend_from_slice(BoundedPtr { ptr, bound: bound.into(), tag: 7.into() }.as_bytes());
    }
    bytes
}

/// Adds a few random ops to a chain; returns the number of ops.
pub(crate) fn build<'a>(
    chain: &mut Chain<'a>,
    store: &Store,
    operands: &'a Operands,
    random: &mut Draws,
) -> usize {
    let ops = 1 + random.below(OPS_MAX);
    let reclaims = random.once_in(2);
    for _ in 0..ops {
        add_any(chain, reclaims, store, operands, random);
    }
    ops as usize
}

fn add_any<'a>(
    chain: &mut Chain<'a>,
    reclaims: bool,
    store: &Store,
    operands: &'a Operands,
    random: &mut Draws,
) {
    let at = |random: &mut Draws| place(store, random);
    match random.below(7) {
        2 if reclaims => add(chain, retire(operands.garbage(random)), false, store, random),
        0 => {
            let len = [0, 1, 8, 16, 17, 32, 300, 5000][random.below(8) as usize];
            let (indirect, bounded) = (random.once_in(2), random.once_in(2));
            let op = read(at(random), if random.once_in(40) { 70_000 } else { len });
            let op = if indirect { op.indirect() } else { op };
            add(chain, if indirect && bounded { op.bounded() } else { op }, true, store, random);
        }
        1 => {
            let (indirect, bounded) = (random.once_in(3), random.once_in(2));
            let op = match random.once_in(3) {
                true => write_from(at(random), at(random), random.below(64) as u32),
                false => write(at(random), operands.bytes(random)),
            };
            let op = if indirect { op.indirect() } else { op };
            add(chain, if indirect && bounded { op.bounded() } else { op }, false, store, random);
        }
        2 => {
            let list = ListId([0, 3, 8, 12, 41][random.below(5) as usize]);
            let op = allocate(list, [operands.bytes(random), operands.bytes(random), b"end"]);
            let op = if random.once_in(4) { op.from_reserve() } else { op };
            let _ = if random.once_in(2) { chain.then(op) } else { chain.also(op) };
        }
        3 => add_cas(chain, reclaims, &operands.words, store, random),
        4 => add_cas(chain, reclaims, &operands.wide, store, random),
        5 => add(chain, retire(operands.garbage(random)), false, store, random),
        _ => add(chain, fetch_add(at(random), pick(&operands.words, random)), true, store, random),
    }
}

fn add_cas<'a, T>(chain: &mut Chain<'a>, reclaims: bool, words: &'a [T], store: &Store, random: &mut Draws)
where
    T: IntoBytes + zerocopy::Immutable,
{
    let mode = Mode::ALL[random.below(6) as usize];
    let at = place(store, random);
    let op = match random.below(3) {
        0 => cas(mode, at, pick(words, random), pick(words, random)),
        1 => cas_from(at, pick(words, random), place(store, random)),
        _ => cas_with(mode, at, place(store, random)),
    };
    let op = if random.once_in(3) { op.masked(pick(words, random), pick(words, random)) } else { op };
    let op = if random.once_in(4) { op.indirect() } else { op };
    add(
        chain,
        if reclaims && random.once_in(2) { op.reclaiming(size_of::<T>() as u32 - 8) } else { op },
        true,
        store,
        random,
    );
}

fn pick<'a, T>(from: &'a [T], random: &mut Draws) -> &'a T {
    &from[random.below(from.len() as u64) as usize]
}

/// Adds one op, which may be conditional, redirected or both.
fn add<'a, T: ?Sized>(chain: &mut Chain<'a>, op: Op<'a, T>, output: bool, store: &Store, random: &mut Draws) {
    let conditional = random.once_in(2);
    if output && random.once_in(3) {
        let op = op.redirect(place(store, random));
        let _ = if conditional { chain.then(op) } else { chain.also(op) };
    } else {
        let _ = if conditional { chain.then(op) } else { chain.also(op) };
    }
}

/// Returns a random address: mostly that of a pointer or a word of the table; sometimes scratch, the table's end, or an
/// address outside the key's region.
fn place(store: &Store, random: &mut Draws) -> Addr {
    match random.below(24) {
        0 => Addr::new(64),
        1 => Addr::new(store.table_at + store.table_len - 8),
        2 => Addr::new(store.table_at + random.below(WORKED - 512)),
        3 => Addr::scratch(random.below(40)),
        4..=8 => Addr::scratch(16 * random.below(2)),
        9..=16 => Addr::new(store.table_at + POINTER_SIZE * random.below(POINTERS)),
        _ => Addr::new(store.table_at + 8 * random.below((WORKED - 4096) / 8)),
    }
}
