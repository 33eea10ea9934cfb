//! Draws ops of every shape on a small prepared node, and runs them three ways: as built, as decoded from bytes, and by
//! the model. All three runs must agree on every status, every output, and every byte of memory afterwards.

use super::lists::head_at;
use super::model::{Model, OpSpec, Right, SEGMENT, Verb, Why, class_size};
use super::{Bytes, PAGE, assign, free_list, give, grant, open, secret, take};
use farside_remote::arena::Arena;
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::Supply;
use farside_remote::arena::reuse::Retirees;
use farside_remote::arena::segment::Use;
use farside_remote::arena::session::{SessionId, counters_at};
use farside_remote::arena::state::Stage;
use farside_remote::draws::Draws;
use farside_remote::op::{Op, cas_with, write_from};
use farside_remote::{Addr, By, Chain, ChainBuf, ChainView, Key, Mode, Reply, Rights, Status};
use farside_remote::{allocate, cas, cas_from, fetch_add, hints, read, retire, run, write};
use std::collections::BTreeMap;
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

const SIZE: u64 = 12 << 20;
/// Number of the client's session. Regions 1 and 2 have keys; the key of region 3 was revoked.
const OWNER: u32 = 77;
/// The sessions for which chains run, as at an engine: the client owns the buffers, and the engine's list receives the
/// retired ones.
const BY: By = By { owner: OWNER, retires: SessionId { slot: 2, number: 78 } };
pub(crate) const MINE: u32 = 1;
const OTHER: u32 = 2;
const REVOKED: u32 = 3;
const SCRATCH: u64 = 1 << 63;

/// Numbers of the prepared node's segments. The two segments of one table are adjacent.
const TABLE: u32 = 0;
const TABLE_OTHER: u32 = 2;
const TABLE_LONE: u32 = 3;
const QUOTA: [u32; 2] = [4, 5];
const RESERVE: u32 = 6;
const QUOTA_OTHER: u32 = 7;
const UNLISTED: u32 = 8;

/// Numbers of the classes that the tests use: the first, the last, and one without a segment.
const SMALL: u64 = 0;
const LARGE: u64 = 40;
const NO_SEGMENT: u64 = 17;

/// Number of chains and ops that ran, and the outcomes seen.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) chains: u64,
    pub(crate) ops: u64,
    pub(crate) seen: BTreeMap<(Verb, u8), u64>,
    pub(crate) retired: BTreeMap<Why, u64>,
}

impl Tally {
    pub(crate) fn saw(&self, verb: Verb, status: Status) -> u64 {
        self.seen.get(&(verb, status as u8)).copied().unwrap_or(0)
    }
}

/// Three copies of one node. The first runs chains as built, the second as decoded, and the third is the model.
pub(crate) struct Comparison {
    built: Bytes,
    decoded: Bytes,
    pub(crate) model: Model,
    pristine: Model,
    pub(crate) tally: Tally,
    reply: Reply,
    chain: ChainBuf,
}

fn at(segment: u32) -> u64 {
    let first = 2 << 20;
    first + u64::from(segment) * SEGMENT
}

fn prepare(memory: &Bytes, contents: &[u8]) {
    memory.poke(at(0), contents);
    [MINE, OTHER].into_iter().for_each(|region| open(memory, region));
    for (segment, region) in [(TABLE, MINE), (TABLE + 1, MINE), (TABLE_OTHER, OTHER), (TABLE_LONE, MINE)] {
        assign(memory, segment, region, Use::Table);
    }
    assign(memory, UNLISTED, MINE, Use::Granted);
    // The states of buffers begin as zeros.
    for segment in QUOTA.into_iter().chain([RESERVE, QUOTA_OTHER]) {
        memory.poke(at(segment), &vec![0; SEGMENT as usize]);
    }
    QUOTA.into_iter().for_each(|segment| grant(memory, segment, MINE, Supply::Quota));
    grant(memory, RESERVE, MINE, Supply::Reserve);
    grant(memory, QUOTA_OTHER, OTHER, Supply::Quota);
    for class in [SMALL, LARGE] {
        let class = Class::get(class as u8).expect("a class");
        let taken: Vec<u64> = (0..6).map(|_| take(memory, MINE, class, Supply::Quota, OWNER)).collect();
        taken.iter().skip(2).for_each(|&at| give(memory, at));
    }
    let class = Class::get(SMALL as u8).expect("a class");
    take(memory, OTHER, class, Supply::Quota, OWNER);
}

impl Comparison {
    pub(crate) fn new() -> Comparison {
        let contents = Draws(1).bytes(10 * SEGMENT as usize);
        let (built, decoded) = (Bytes::new(SIZE), Bytes::new(SIZE));
        prepare(&built, &contents);
        prepare(&decoded, &contents);
        let mut pristine = Model { bytes: built.all(), ..Model::default() };
        let book = &mut pristine.book;
        book.secrets = [(MINE, secret(MINE)), (OTHER, secret(OTHER)), (REVOKED, 0)].into();
        book.rights = Right::ALL.into();
        book.wide = true;
        book.tables = vec![
            (MINE, at(TABLE), at(TABLE + 2)),
            (OTHER, at(TABLE_OTHER), at(TABLE_OTHER + 1)),
            (MINE, at(TABLE_LONE), at(TABLE_LONE + 1)),
        ];
        book.granted.insert((MINE, false), QUOTA.map(at).into());
        book.granted.insert((MINE, true), vec![at(RESERVE)]);
        book.granted.insert((OTHER, false), vec![at(QUOTA_OTHER)]);
        for class in [SMALL, LARGE] {
            let taken: Vec<u64> = (0..6).map(|_| book.take(MINE, class, false).expect("granted")).collect();
            taken.iter().skip(2).for_each(|&at| book.give(at));
        }
        book.take(OTHER, SMALL, false).expect("granted");
        for memory in [&built, &decoded] {
            memory.take_touched();
        }
        let mut comparison = Comparison {
            built,
            decoded,
            model: pristine.clone(),
            pristine,
            tally: Tally::default(),
            reply: Reply::new(),
            chain: ChainBuf::new(),
        };
        comparison.compare_everything("as prepared");
        comparison
    }

    /// Restores the memory as it was before the last chain.
    pub(crate) fn reset(&mut self) {
        for page in std::mem::take(&mut self.model.touched) {
            let bytes = (page * PAGE) as usize..((page + 1) * PAGE) as usize;
            self.model.bytes[bytes.clone()].copy_from_slice(&self.pristine.bytes[bytes]);
        }
        self.model.book = self.pristine.book.clone();
        for memory in [&self.built, &self.decoded] {
            memory.limit_rights(Rights::ALL);
            memory.set_wide(true);
            for page in memory.take_touched() {
                let bytes = (page * PAGE) as usize..((page + 1) * PAGE) as usize;
                memory.poke(page * PAGE, &self.pristine.bytes[bytes]);
            }
            memory.take_touched();
        }
    }

    /// Limits the keys to the given rights, until the next reset.
    pub(crate) fn limit_rights(&mut self, rights: &[Right]) {
        self.model.book.rights = rights.to_vec();
        let rights: Rights = rights
            .iter()
            .map(|right| match right {
                Right::Read => Rights::READ,
                Right::Write => Rights::WRITE,
                Right::Atomic => Rights::ATOMIC,
                Right::Allocate => Rights::ALLOCATE,
            })
            .collect();
        [&self.built, &self.decoded].into_iter().for_each(|memory| memory.limit_rights(rights));
    }

    /// Makes the regions support no words of 24 and 32 bytes, until the next reset.
    pub(crate) fn disable_wide(&mut self) {
        self.model.book.wide = false;
        [&self.built, &self.decoded].into_iter().for_each(|memory| memory.set_wide(false));
    }

    fn poke(&mut self, at: u64, bytes: &[u8]) {
        self.model.poke(at, bytes);
        [&self.built, &self.decoded].into_iter().for_each(|memory| memory.poke(at, bytes));
    }

    /// Runs the chain in all three ways and compares the results.
    ///
    /// # Panics
    /// If the results differ. The message shows the ops.
    pub(crate) fn run(&mut self, (region, secret): (u32, u64), specs: &[OpSpec]) -> Vec<Status> {
        let key = Key::new(region, secret);
        let retired_before = self.model.book.retired.len();
        let expected = self.model.run((region, secret), specs);
        let wire = encode(key, specs);
        let (view, rest) = ChainView::decode(&wire).unwrap_or_else(|error| panic!("{error}: {specs:#x?}"));
        assert!(rest.is_empty());
        let mut hinted = 0;
        hints(view, |_| hinted += 1);
        assert!(hinted <= specs.len());
        let retired = self.model.book.retired.len() - retired_before;
        for (_, why) in &self.model.book.retired[retired_before..] {
            *self.tally.retired.entry(*why).or_default() += 1;
        }
        let Ok(()) = run(&self.decoded, BY, view, &mut self.reply);
        assert_eq!(self.reply.retired() as usize, retired, "{specs:#x?}");
        compare("decoded", specs, &expected, &self.reply);
        let mut carried = Reply::new();
        carried.decode(specs.len(), self.reply.as_bytes()).expect("a reply decodes");
        compare("decoded, with a decoded reply", specs, &expected, &carried);

        let mut chain = self.chain.begin(key);
        if specs.iter().all(|spec| build(spec, &mut chain)) {
            let mut bytes = Vec::new();
            chain.write_to(&mut bytes);
            assert!(bytes == wire, "the builder's bytes differ from the described layout: {specs:#x?}");
            let Ok(()) = run(&self.built, BY, chain.view(), &mut self.reply);
        } else {
            let Ok(()) = run(&self.built, BY, view, &mut self.reply);
        }
        compare("as built", specs, &expected, &self.reply);
        for memory in [&self.built, &self.decoded] {
            self.compare_touched(memory, specs);
        }
        self.tally.chains += 1;
        for (spec, (status, _)) in specs.iter().zip(&expected) {
            self.tally.ops += 1;
            *self.tally.seen.entry((spec.verb, *status as u8)).or_default() += 1;
        }
        expected.into_iter().map(|(status, _)| status).collect()
    }

    /// Compares all pages written since the last reset; no other page can differ.
    fn compare_touched(&self, memory: &Bytes, specs: &[OpSpec]) {
        let touched = memory.take_touched();
        for &page in touched.union(&self.model.touched) {
            self.compare_page(memory, page, &|| format!("after {specs:#x?}"));
        }
        self.compare_books(memory, &|| format!("after {specs:#x?}"));
        // Mark these pages as touched again, so that a reset restores them.
        for page in touched {
            let byte = memory.peek(page * PAGE, 1);
            memory.poke(page * PAGE, &byte);
        }
    }

    pub(crate) fn compare_everything(&mut self, when: &str) {
        for memory in [&self.built, &self.decoded] {
            for page in 0..SIZE / PAGE {
                self.compare_page(memory, page, &|| when.to_owned());
            }
            self.compare_books(memory, &|| when.to_owned());
        }
    }

    fn compare_page(&self, memory: &Bytes, page: u64, when: &dyn Fn() -> String) {
        let (mut start, end) = (page * PAGE, (page + 1) * PAGE);
        // The node's own records of regions and segments are compared by meaning.
        let regions = [1 + u64::from(MINE), 1 + u64::from(OTHER)];
        let segments = (PAGE + (1 << 20) + (256 << 10) + (512 << 10)) / PAGE;
        let sessions = counters_at(BY.retires.slot) / PAGE;
        if regions.contains(&page) || page == segments || page == sessions {
            return;
        }
        if let Some(pile) = self.model.book.piles.iter().find(|p| p.base <= start && start < p.base + SEGMENT)
        {
            start = start.max(pile.first).min(end);
        }
        let real = memory.peek(start, end - start);
        let model = &self.model.bytes[start as usize..end as usize];
        if real != model {
            let byte = real.iter().zip(model).position(|(a, b)| a != b).expect("they differ");
            panic!(
                "byte {:#x} is {:#x}, the model's {:#x}, {}",
                start + byte as u64,
                real[byte],
                model[byte],
                when()
            );
        }
    }

    fn compare_books(&self, memory: &Bytes, when: &dyn Fn() -> String) {
        let (arena, book) = (Arena::of(memory), &self.model.book);
        for pile in &book.piles {
            let Ok(segment) = arena.segment(((pile.base - at(0)) / SEGMENT) as u32);
            let real = (segment.region, segment.usage, u64::from(segment.used));
            assert_eq!(real, (pile.region, Use::Buffers(pile.class as u8), pile.used), "{}", when());
        }
        for (&(region, class), free) in &book.free {
            let mut real = free_list(memory, region, Class::get(class as u8).expect("a class"));
            real.reverse();
            assert_eq!(&real, free, "the free list of class {class} {}", when());
        }
        let state = |at: u64| {
            let Ok(Some((_, buffer))) = arena.buffer_at(at) else {
                panic!("{at:#x} is not a buffer, {}", when())
            };
            let Ok(state) = arena.state(&buffer);
            state
        };
        let stage = |at: u64| (state(at).stage, state(at).owner);
        let mut next = retired_head(memory);
        for &(at, _) in book.retired.iter().rev() {
            assert_eq!(next, at, "the retired list, {}", when());
            assert_eq!(stage(at), (Stage::Retired, BY.retires.number), "buffer {at:#x} {}", when());
            next = state(at).next;
        }
        assert_eq!(next, 0, "the retired list is too long, {}", when());
        for &at in &book.live {
            assert_eq!(stage(at), (Stage::Live, OWNER), "buffer {at:#x} {}", when());
        }
        for &at in book.free.values().flatten() {
            assert_eq!(stage(at), (Stage::Free, 0), "buffer {at:#x} {}", when());
        }
        for ((region, reserve), granted) in &book.granted {
            let supply = if *reserve { Supply::Reserve } else { Supply::Quota };
            let Ok(real) = arena.has_granted(*region, supply);
            assert_eq!(real, !granted.is_empty(), "granted to region {region}, {}", when());
        }
    }
}

/// Returns the first buffer on the list of retired buffers that are for the node. The regions permit no reuse.
fn retired_head(memory: &Bytes) -> u64 {
    let word = memory.peek(head_at(BY.retires.slot, Retirees::Node), 8);
    u64::from_le_bytes(word.try_into().expect("eight bytes")) & ((1 << 48) - 1)
}

fn compare(how: &str, specs: &[OpSpec], expected: &[(Status, Vec<u8>)], reply: &Reply) {
    let statuses: Vec<Status> = expected.iter().map(|(status, _)| *status).collect();
    assert_eq!(reply.statuses().collect::<Vec<_>>(), statuses, "{how}: {specs:#x?}");
    for (index, (_, output)) in expected.iter().enumerate() {
        assert!(reply.output(index) == output, "{how}: output {index} of {specs:#x?}");
    }
}

/// Encodes a chain from the description of the wire format, without the crate's builder.
pub(crate) fn encode(key: Key, specs: &[OpSpec]) -> Vec<u8> {
    let mut ops = Vec::new();
    for spec in specs {
        let cas = spec.verb == Verb::Cas;
        let flags = [
            spec.indirect,
            spec.source.is_some(),
            spec.bounded,
            spec.conditional,
            spec.redirect.is_some(),
            cas && spec.compare.is_some(),
            cas && spec.masks.is_some(),
            cas && spec.reclaims.is_some(),
        ];
        let flags = flags.iter().enumerate().fold(0, |all, (bit, &set)| all | u8::from(set) << bit);
        let mode = if cas { spec.mode } else { u8::from(spec.from_reserve) } | u8::from(spec.fenced) << 7;
        let width = match spec.verb {
            Verb::Cas => spec.width as u8,
            Verb::FetchAdd => 8,
            _ => 0,
        };
        let len = match spec.verb {
            Verb::Cas => spec.reclaims.unwrap_or(0) as u32,
            Verb::FetchAdd => 0,
            _ => spec.len() as u32,
        };
        ops.extend([spec.verb as u8 + 1, flags, mode, width]);
        ops.extend(len.to_le_bytes());
        ops.extend(spec.at.to_le_bytes());
        ops.extend(spec.redirect.into_iter().chain(spec.source).flat_map(u64::to_le_bytes));
        if cas {
            ops.extend(spec.compare.iter().flatten());
        }
        if spec.source.is_none() {
            ops.extend(&spec.data);
        }
        if let Some((compare, swap)) = &spec.masks {
            ops.extend(compare.iter().chain(swap));
        }
    }
    let count = |verbs: &[Verb]| specs.iter().filter(|spec| verbs.contains(&spec.verb)).count() as u16;
    let mut wire = Vec::new();
    wire.extend(key.secret().to_le_bytes());
    wire.extend(key.region().to_le_bytes());
    wire.extend((ops.len() as u32).to_le_bytes());
    wire.extend((specs.len() as u16).to_le_bytes());
    wire.extend(count(&[Verb::Allocate]).to_le_bytes());
    wire.extend(count(&[Verb::Cas, Verb::FetchAdd]).to_le_bytes());
    wire.extend([0; 2]);
    wire.extend(ops);
    wire
}

/// Adds the op with the builder. Returns false if the builder cannot express it.
fn build<'a>(spec: &'a OpSpec, chain: &mut Chain<'a>) -> bool {
    let at = Addr::new(spec.at);
    match spec.verb {
        Verb::Read => push(spec, modified(spec, read(at, spec.len)), chain),
        Verb::Write => {
            let op = match spec.source {
                Some(source) => write_from(at, Addr::new(source), spec.len),
                None => write(at, &spec.data),
            };
            push(spec, modified(spec, op), chain);
        }
        Verb::Allocate => {
            let Ok(list) = u32::try_from(spec.at) else { return false };
            let (head, rest) = spec.data.split_at(spec.cuts[0]);
            let (middle, tail) = rest.split_at(spec.cuts[1] - spec.cuts[0]);
            let op = allocate(farside_remote::op::ListId(list), [head, middle, tail]);
            push(spec, if spec.from_reserve { op.from_reserve() } else { op }, chain);
        }
        Verb::Cas => {
            return match spec.width {
                8 => build_cas::<8>(spec, chain),
                16 => build_cas::<16>(spec, chain),
                24 => build_cas::<24>(spec, chain),
                _ => build_cas::<32>(spec, chain),
            };
        }
        Verb::FetchAdd => {
            let addend = U64::ref_from_bytes(&spec.data).expect("eight bytes");
            push(spec, modified(spec, fetch_add(at, addend)), chain);
        }
        Verb::Retire => {
            let buffers = <[Addr]>::ref_from_bytes(&spec.data).expect("addresses");
            add(spec, retire(buffers), chain);
        }
    }
    true
}

fn build_cas<'a, const N: usize>(spec: &'a OpSpec, chain: &mut Chain<'a>) -> bool {
    fn word<const N: usize>(bytes: &[u8]) -> &[u8; N] {
        bytes.try_into().expect("operands have the word's width")
    }
    let (at, mode) = (Addr::new(spec.at), Mode::ALL[spec.mode as usize]);
    let op = match (&spec.compare, spec.source) {
        (Some(compare), None) => cas(mode, at, word::<N>(compare), word::<N>(&spec.data)),
        (Some(compare), Some(source)) if mode == Mode::Eq => {
            cas_from(at, word::<N>(compare), Addr::new(source))
        }
        (None, Some(source)) => cas_with::<[u8; N]>(mode, at, Addr::new(source)),
        _ => return false,
    };
    let op = match &spec.masks {
        Some((compare, swap)) => op.masked(word::<N>(compare), word::<N>(swap)),
        None => op,
    };
    let op = match spec.reclaims {
        Some(offset) => op.reclaiming(offset as u32),
        None => op,
    };
    push(spec, modified(spec, op), chain);
    true
}

fn modified<'a, T: ?Sized>(spec: &OpSpec, mut op: Op<'a, T>) -> Op<'a, T> {
    if spec.indirect {
        op = op.indirect();
    }
    if spec.bounded {
        op = op.bounded();
    }
    if spec.fenced {
        op = op.fenced();
    }
    op
}

fn push<'a, T: ?Sized>(spec: &OpSpec, op: Op<'a, T>, chain: &mut Chain<'a>) {
    match spec.redirect {
        Some(to) => add(spec, op.redirect(Addr::new(to)), chain),
        None => add(spec, op, chain),
    }
}

fn add<'a, T: ?Sized>(spec: &OpSpec, op: Op<'a, T>, chain: &mut Chain<'a>) {
    let _ = if spec.conditional { chain.then(op) } else { chain.also(op) };
}

/// Where an op's second address points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Second {
    None,
    Scratch,
    Node,
}

impl Second {
    pub(crate) const ALL: [Second; 3] = [Second::None, Second::Scratch, Second::Node];
}

/// All properties of an op except its operands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) verb: Verb,
    pub(crate) conditional: bool,
    pub(crate) indirect: bool,
    pub(crate) bounded: bool,
    pub(crate) source: Second,
    pub(crate) redirect: Second,
    pub(crate) compare: bool,
    pub(crate) masked: bool,
    pub(crate) mode: u8,
    pub(crate) width: usize,
    pub(crate) reclaims: Option<usize>,
    pub(crate) from_reserve: bool,
    /// Whether the op is fenced. CAS has too many shapes: its fences are drawn.
    pub(crate) fenced: bool,
}

impl Shape {
    /// Returns all legal shapes of ops.
    pub(crate) fn all() -> Vec<Shape> {
        const BOTH: [bool; 2] = [false, true];
        let plain = Shape {
            verb: Verb::Read,
            conditional: false,
            indirect: false,
            bounded: false,
            source: Second::None,
            redirect: Second::None,
            compare: false,
            masked: false,
            mode: 0,
            width: 0,
            reclaims: None,
            from_reserve: false,
            fenced: false,
        };
        let mut all = Vec::new();
        for conditional in BOTH {
            all.push(Shape { verb: Verb::Retire, conditional, ..plain });
            for second in Second::ALL {
                for (indirect, bounded) in [(false, false), (true, false), (true, true)] {
                    let plain = Shape { conditional, indirect, bounded, ..plain };
                    all.push(Shape { redirect: second, ..plain });
                    all.push(Shape { verb: Verb::Write, source: second, ..plain });
                }
                let plain = Shape { conditional, redirect: second, ..plain };
                all.push(Shape { verb: Verb::FetchAdd, width: 8, ..plain });
                for from_reserve in BOTH {
                    all.push(Shape { verb: Verb::Allocate, from_reserve, ..plain });
                }
                for source in Second::ALL {
                    for bits in 0..8 * 4 * 6 * 2 {
                        let (width, mode) = (8 + (bits & 24) as usize, (bits / 32 % 6) as u8);
                        // At the start of the word, or at another legal offset.
                        let offset = if mode % 2 == 0 { 0 } else { (width - 8) / 4 * 3 };
                        all.push(Shape {
                            verb: Verb::Cas,
                            source,
                            indirect: bits & 1 != 0,
                            compare: bits & 2 != 0,
                            masked: bits & 4 != 0,
                            width,
                            mode,
                            reclaims: (bits >= 8 * 4 * 6).then_some(offset),
                            ..plain
                        });
                    }
                }
            }
        }
        let is_fenced = |shape: &&Shape| matches!(shape.verb, Verb::Read | Verb::Write | Verb::FetchAdd);
        let fenced = all.iter().filter(is_fenced).map(|shape| Shape { fenced: true, ..*shape });
        let fenced: Vec<Shape> = fenced.collect();
        all.extend(fenced);
        all
    }
}

fn mostly_aligned(random: &mut Draws, at: u64, width: usize) -> u64 {
    let align = if width > 16 { 32 } else { 16 };
    if random.once_in(12) { at } else { at & !(align - 1) }
}

const LENGTHS: [u32; 15] = [0, 1, 7, 8, 15, 16, 17, 48, 64, 100, 512, 513, 1000, 1500, 4096];

impl Comparison {
    /// Draws a key, which is the correct one in most cases.
    pub(crate) fn draw_key(&self, random: &mut Draws) -> (u32, u64) {
        if !random.once_in(12) {
            return (MINE, secret(MINE));
        }
        random.pick(&[
            (MINE, secret(MINE) ^ 1),
            (MINE, 0),
            (OTHER, secret(OTHER)),
            (OTHER, secret(MINE)),
            (0, secret(MINE)),
            (REVOKED, secret(REVOKED)),
            (REVOKED, 0),
            (256, secret(MINE)),
            (u32::MAX, secret(MINE)),
        ])
    }

    /// Draws an address: mostly in region 1's table, aligned.
    fn draw_place(&self, random: &mut Draws) -> u64 {
        let size = class_size(LARGE);
        let large =
            self.pristine.book.piles.iter().find(|pile| pile.class == LARGE).expect("it was prepared");
        let small =
            self.pristine.book.piles.iter().find(|pile| pile.class == SMALL).expect("it was prepared");
        let near = random.below(80);
        match random.below(40) {
            28.. | 0..=8 => at(TABLE) + 16 * random.below(200),
            9 => at(TABLE) + random.below(4096),
            10 => at(TABLE + 1) - near,
            11 => at(TABLE + 2) - near,
            12 => at(TABLE_LONE) + 8 * random.below(600),
            13 => at(TABLE_LONE + 1) - near,
            14 => large.first + size * random.below(8),
            15 => large.first + size * (1 + random.below(8)) - near,
            16 => large.first + size * large.count - near,
            17 => small.first + 16 * random.below(64),
            18 => small.first - near,
            19 | 20 => SCRATCH + 8 * random.below(4),
            21 => SCRATCH + random.below(48),
            22 => 0,
            23 => at(TABLE_OTHER) + 8 * random.below(600),
            24 => random.pick(&[8, 64, PAGE, 2 * PAGE, 2 * PAGE + 64, 2 * PAGE + 128, at(0) - 16]),
            25 => at(random.pick(&[QUOTA[0], UNLISTED, RESERVE, 9])) + 16 * random.below(100),
            26 => random.pick(&[SIZE - 8, SIZE, SIZE + 8, SCRATCH - 8, SCRATCH - 16, 1 << 40]),
            _ => random.pick(&[u64::MAX - 7, u64::MAX - 15, u64::MAX, SCRATCH | at(TABLE), SCRATCH - 1]),
        }
    }

    fn draw_len(random: &mut Draws) -> u32 {
        if random.once_in(40) { random.pick(&[20_000, 65_535, 65_536]) } else { random.pick(&LENGTHS) }
    }

    fn draw_second(&self, random: &mut Draws, second: Second, of: u64, width: usize) -> Option<u64> {
        // Mostly aligned to the word's width.
        let aligned = |random: &mut Draws| SCRATCH + 8 * random.below(5 - (width as u64 / 8).max(1));
        match second {
            Second::None => None,
            Second::Scratch if random.once_in(6) => Some(SCRATCH + random.below(40)),
            Second::Scratch => Some(aligned(random)),
            // Overlaps the target, before and behind it.
            Second::Node if random.once_in(6) => Some(of.wrapping_add(64).wrapping_sub(16 * random.below(9))),
            Second::Node => Some(self.draw_place(random)),
        }
    }

    /// Draws one op of that shape, with the ops that prepare it, and writes the pointers that it follows.
    pub(crate) fn draw(&mut self, random: &mut Draws, shape: Shape, specs: &mut Vec<OpSpec>) {
        let target = match shape.verb {
            Verb::Allocate => self.draw_list(random),
            Verb::Retire => 0,
            Verb::Read | Verb::Write => self.draw_place(random),
            Verb::Cas | Verb::FetchAdd => {
                let place = self.draw_place(random);
                mostly_aligned(random, place, shape.width)
            }
        };
        let at =
            if shape.indirect { self.draw_pointer(random, target, shape.bounded, specs) } else { target };
        let source = self.draw_second(random, shape.source, target, shape.width);
        let source = source.map(|source| match shape.width {
            0 => source,
            width => mostly_aligned(random, source, width),
        });
        let redirect = self.draw_second(random, shape.redirect, target, shape.width);
        let mut spec = OpSpec {
            verb: shape.verb,
            conditional: shape.conditional,
            indirect: shape.indirect,
            bounded: shape.bounded,
            at,
            source,
            redirect,
            mode: shape.mode,
            width: shape.width,
            reclaims: shape.reclaims,
            from_reserve: shape.from_reserve,
            fenced: shape.fenced,
            len: Comparison::draw_len(random),
            ..OpSpec::default()
        };
        if shape.reclaims.is_some() && random.once_in(2) {
            // An allocation for the CAS to install or to retire.
            let redirect = source.filter(|_| !random.once_in(4));
            let (list, data) = (random.pick(&[SMALL, LARGE]), random.bytes(40));
            let conditional = random.once_in(4);
            specs.push(OpSpec {
                verb: Verb::Allocate,
                conditional,
                at: list,
                data,
                redirect,
                ..OpSpec::default()
            });
        }
        match shape.verb {
            Verb::Read => {}
            Verb::Write => {
                if source.is_none() {
                    let len = random.pick(&LENGTHS) as usize;
                    spec.data = random.bytes(len);
                }
            }
            Verb::Allocate => {
                let edge = class_size(target.min(LARGE)) as usize;
                let len = if random.once_in(3) { edge + random.below(3) as usize - 1 } else { 40 };
                let len = if len > 8000 { random.below(1200) as usize } else { len };
                spec.data = random.bytes(len);
                let mut cuts = [random.below(len as u64 + 1) as usize, random.below(len as u64 + 1) as usize];
                cuts.sort_unstable();
                spec.cuts = cuts;
            }
            Verb::Cas => {
                self.draw_operands(random, shape, target, &mut spec, specs);
                spec.fenced = random.once_in(3);
            }
            Verb::FetchAdd => spec.data = random.next().to_le_bytes().into(),
            Verb::Retire => {
                let count = random.pick(&[0, 1, 1, 2, 3, 40]);
                spec.data = (0..count).flat_map(|_| self.draw_garbage(random).to_le_bytes()).collect();
            }
        }
        specs.push(spec);
    }

    /// Draws an address to retire: mostly of a live buffer, otherwise any.
    fn draw_garbage(&self, random: &mut Draws) -> u64 {
        let book = &self.pristine.book;
        match random.below(8) {
            0..=3 => {
                let live: Vec<u64> = book.live.iter().copied().collect();
                random.pick(&live)
            }
            // A free buffer, or the next to be taken, perhaps by this very chain.
            4 => {
                let class = random.pick(&[SMALL, LARGE]);
                random.pick(&book.free[&(MINE, class)])
            }
            // An address inside a live buffer.
            5 => book.live.first().expect("some are live") + random.pick(&[1, 8, 16, 32]),
            6 => random.pick(&[0, SCRATCH, SCRATCH + 8, at(QUOTA[0]), at(TABLE_OTHER), at(QUOTA_OTHER) + 64]),
            _ => self.draw_place(random),
        }
    }

    fn draw_list(&self, random: &mut Draws) -> u64 {
        match random.below(16) {
            0..=5 => SMALL,
            6..=11 => LARGE,
            12 => random.pick(&[41, 255, 256, u64::MAX, SCRATCH]),
            13 => NO_SEGMENT,
            _ => random.below(41),
        }
    }

    /// Stores a pointer to `target`, and returns its address.
    fn draw_pointer(
        &mut self,
        random: &mut Draws,
        target: u64,
        bounded: bool,
        specs: &mut Vec<OpSpec>,
    ) -> u64 {
        let mut pointer = target.to_le_bytes().to_vec();
        let bound = random.pick(&[0, 1, 16, 100, 1000, 4096, u32::MAX]);
        pointer.extend(bound.to_le_bytes());
        pointer.extend((random.next() as u32).to_le_bytes());
        let slot = at(TABLE_LONE) + 0x8000 + 16 * random.below(1000);
        match random.below(10) {
            0 | 1 => {
                // In scratch, an earlier op stores it.
                let at = if bounded { 16 * random.below(2) } else { 8 * random.below(3) };
                let data = pointer[..if bounded { 16 } else { 8 }].to_vec();
                let conditional = random.once_in(2);
                specs.push(OpSpec {
                    verb: Verb::Write,
                    conditional,
                    at: SCRATCH + at,
                    data,
                    ..OpSpec::default()
                });
                SCRATCH + at
            }
            2 => self.draw_place(random),
            3 => slot + random.pick(&[1, 4, 8, 15]),
            _ => {
                self.poke(slot, &pointer);
                slot
            }
        }
    }

    /// Draws operands near the target's value, so that each comparison can hold or fail.
    fn draw_operands(
        &mut self,
        random: &mut Draws,
        shape: Shape,
        target: u64,
        spec: &mut OpSpec,
        specs: &mut Vec<OpSpec>,
    ) {
        let width = shape.width;
        if let Some(offset) = shape.reclaims
            && self.is_in_table(target, width)
            && random.once_in(2)
        {
            // The word's pointer before the CAS.
            let pointer = self.draw_garbage(random);
            self.poke(target + offset as u64, &pointer.to_le_bytes());
        }
        let held = match target.checked_add(width as u64) {
            Some(end) if end <= SIZE => self.model.bytes[target as usize..end as usize].to_vec(),
            _ => vec![0; width],
        };
        let near = |random: &mut Draws| {
            let mut word = held.clone();
            if !random.once_in(3) {
                let byte = random.below(width as u64) as usize;
                word[byte] = word[byte].wrapping_add(random.pick(&[1, 0xff, 0x80]));
            }
            if random.once_in(4) { random.bytes(width) } else { word }
        };
        spec.len = 0;
        if shape.compare {
            spec.compare = Some(near(random));
        }
        match spec.source {
            None => spec.data = near(random),
            Some(source) if (at(TABLE)..at(TABLE + 1)).contains(&source) => {
                let word = near(random);
                self.poke(source, &word);
            }
            Some(source) if source >= SCRATCH && !random.once_in(4) => {
                let (conditional, data) = (random.once_in(2), near(random));
                specs.push(OpSpec { verb: Verb::Write, conditional, at: source, data, ..OpSpec::default() });
            }
            Some(_) => {}
        }
        if shape.masked {
            let mask = |random: &mut Draws| match random.below(4) {
                0 => vec![0xff; width],
                1 => vec![0; width],
                2 => (0..width).map(|i| if i < width / 2 { 0xff } else { 0 }).collect(),
                _ => random.bytes(width),
            };
            let masks = (mask(random), mask(random));
            spec.masks = Some(masks);
        }
    }

    fn is_in_table(&self, at: u64, width: usize) -> bool {
        self.pristine
            .book
            .tables
            .iter()
            .any(|&(_, start, end)| start <= at && at < end && end - at >= width as u64)
    }

    /// Prepends an op that changes the outcome: a failure, a refusal, a full reply.
    pub(crate) fn draw_preface(&self, random: &mut Draws, specs: &mut Vec<OpSpec>) {
        let word = |fill: u8| vec![fill; 8];
        let failed = OpSpec { verb: Verb::Cas, at: at(TABLE), width: 8, data: word(0), ..OpSpec::default() };
        let failed = OpSpec { compare: Some(word(0)), masks: None, ..failed };
        let null = OpSpec { at: SCRATCH + 24, indirect: true, len: 8, ..OpSpec::default() };
        let skipped = OpSpec { conditional: true, at: SCRATCH, len: 1, ..OpSpec::default() };
        let refused = OpSpec { at: 8, len: 8, ..OpSpec::default() };
        let misaligned = OpSpec { verb: Verb::FetchAdd, at: SCRATCH + 1, data: word(1), ..OpSpec::default() };
        let too_long = OpSpec { at: at(TABLE), len: 65_536, ..OpSpec::default() };
        let unfed = OpSpec { verb: Verb::Allocate, at: NO_SEGMENT, data: word(0), ..OpSpec::default() };
        let prefaces: &[&[&OpSpec]] = &[
            &[&failed],
            &[&failed, &skipped],
            &[&null],
            &[&refused],
            &[&misaligned],
            &[&too_long],
            &[&unfed],
        ];
        if random.once_in(8) {
            // Leaves almost no space in the reply, so that most outputs do not fit.
            let entries = 8 * (specs.len() as u32 + 1);
            let len = 65_536 - entries - random.below(20) as u32;
            specs.insert(0, OpSpec { at: at(TABLE), len, ..OpSpec::default() });
        } else if random.once_in(4) {
            let preface = random.pick(prefaces);
            specs.splice(0..0, preface.iter().map(|&spec| spec.clone()));
        }
    }
}

/// Draws operands `times` for each shape of CAS, and `times_few` for those of the verbs with few shapes. Returns the
/// outcomes of each shape.
pub(crate) fn enumerate(
    comparison: &mut Comparison,
    shapes: &[Shape],
    times: u64,
    times_few: u64,
) -> Vec<Vec<Status>> {
    let mut outcomes = Vec::new();
    for (index, &shape) in shapes.iter().enumerate() {
        let mut seen = Vec::new();
        for draw in 0..if shape.verb == Verb::Cas { times } else { times_few } {
            let mut random = Draws((index as u64) << 32 | draw);
            comparison.reset();
            let mut specs = Vec::new();
            comparison.draw(&mut random, shape, &mut specs);
            // A READ at the end shows the contents of scratch.
            specs.push(OpSpec { at: 1 << 63, len: 32, ..OpSpec::default() });
            comparison.draw_preface(&mut random, &mut specs);
            if random.once_in(12) {
                comparison.disable_wide();
            }
            if random.once_in(12) {
                comparison.limit_rights(&Right::sets()[random.below(16) as usize]);
            }
            let key = comparison.draw_key(&mut random);
            let statuses = comparison.run(key, &specs);
            seen.push(statuses[statuses.len() - 2]);
        }
        outcomes.push(seen);
        if index % 128 == 0 {
            comparison.compare_everything("in between");
        }
    }
    comparison.compare_everything("at the end");
    outcomes
}
