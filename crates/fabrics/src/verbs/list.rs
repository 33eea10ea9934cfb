//! A chain as a list of requests to the NIC, and the reply from what the NIC has returned.
//!
//! Each READ, WRITE, CAS and FETCH-ADD is one request; a fenced op waits for the READs and atomics before it. Only the
//! last request reports its completion: requests of a queue pair complete in their order. Data goes through a buffer of
//! the list: payloads of WRITEs, then outputs. A payload that fits into its request travels in it.
//!
//! Invariant: the statuses are those of the simulator's `verbs` for the same chain.

use super::request::Extent;
use super::sys::{IbvAtomic, IbvRdma, IbvRemote, IbvSendWr, IbvSge, is};
use farside_remote::chain::OpView;
use farside_remote::wire::{Code, FENCED, REPLY_BYTES_MAX, flag};
use farside_remote::{Capabilities, ChainView, Reply, Status};

/// Who executes a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Runner {
    /// The NIC, with a buffer of this number of bytes.
    Nic(usize),
    /// The node's engine.
    Engine,
    /// Nobody, for this reason.
    Nobody(String),
}

/// Chooses who executes a chain. `nic_atomics`: the NIC executes all atomics of the node, and engines none.
pub(super) fn runner(chain: ChainView<'_>, nic_atomics: bool) -> Runner {
    if !nic_atomics && (chain.atomics() > 0 || chain.allocates() > 0) {
        return Runner::Engine; // The common case, without a look at the ops.
    }
    match lacking(chain) {
        None if !chain.is_empty() => Runner::Nic(size(chain)),
        Some(what) if nic_atomics => Runner::Nobody(format!(
            "chain refused: the node's NIC cannot execute {what}, and with --nic-atomics its engines do not: use a \
             node without that flag, which has {}",
            Capabilities::SOFTWARE
        )),
        _ => Runner::Engine,
    }
}

/// Returns the first thing that a chain needs and a NIC lacks, if any.
fn lacking(chain: ChainView<'_>) -> Option<String> {
    const PRISM: u8 =
        flag::TARGET_INDIRECT | flag::DATA_INDIRECT | flag::BOUNDED | flag::REDIRECT | flag::RECLAIMING;
    chain.ops().enumerate().find_map(|(place, op)| {
        let header = op.header();
        let what = match op.code() {
            Code::Allocate => Some("ALLOCATE"),
            Code::Retire => Some("RETIRE"),
            // The first op always runs, so its conditional flag has no effect.
            _ if place > 0 && op.has(flag::CONDITIONAL) => Some("a conditional op"),
            _ if header.flags & PRISM != 0 => Some("an op with PRISM's extensions"),
            _ if op.target().scratch_offset().is_some() => Some("an op on scratch"),
            _ if op.target().on_chip_offset().is_some() => Some("an op on its own words, which it lacks"),
            Code::Cas if header.width != 8 => Some("a CAS of more than 8 bytes"),
            Code::Cas if header.mode & !FENCED != 0 => Some("a CAS that compares for order"),
            Code::Cas | Code::FetchAdd if op.has(flag::MASKED) => Some("a masked CAS"),
            _ => None,
        };
        what.map(|what| format!("op {place}, {what}"))
    })
}

/// Number of bytes that a chain's list needs in its buffer. A READ that does not fit the reply is not posted.
fn size(chain: ChainView<'_>) -> usize {
    let (mut room, mut size) = (room(chain), 0);
    for op in chain.ops() {
        let output = output(&op);
        if output <= room {
            room -= output;
            size += aligned(len(&op));
        }
    }
    size
}

/// Number of bytes of outputs that the reply of a chain can have.
fn room(chain: ChainView<'_>) -> usize {
    REPLY_BYTES_MAX - 8 * chain.len()
}

/// Number of bytes that an op returns.
fn output(op: &OpView<'_>) -> usize {
    if op.code() == Code::Write { 0 } else { len(op) }
}

/// Number of bytes that an op takes or returns.
fn len(op: &OpView<'_>) -> usize {
    if op.code().is_atomic() { 8 } else { op.header().len.get() as usize }
}

/// The next place for the result of an atomic, which is a whole word.
fn aligned(len: usize) -> usize {
    len.next_multiple_of(8)
}

/// An op of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// The op is request number `request`. Its output has `len` bytes at `at` of the buffer. A CAS compares with
    /// `compare`.
    Posted { request: u32, at: usize, len: usize, compare: Option<u64> },
    /// The op is not posted: it ends with this status.
    Ended(Status),
}

/// A chain's list of requests, in memory that is reused.
#[derive(Default)]
pub(super) struct List {
    steps: Vec<Step>,
    pub(super) requests: Vec<IbvSendWr>,
    /// The piece of the buffer of each request. Its address is the offset in the buffer until [`List::place`].
    pub(super) pieces: Vec<IbvSge>,
}

// SAFETY: the pointers in `requests` are set and used within one post.
unsafe impl Send for List {}

/// How a chain is translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    /// Whether the ops of a chain are to be executed in their order, as engines do. Then each op after a READ is
    /// fenced.
    pub(super) in_order: bool,
    /// Whether an op outside the registered memory has no access. Otherwise the chain is not translated.
    pub(super) is_final: bool,
}

/// An address of the chain is outside the memory that the NIC reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outside;

impl List {
    /// Translates a chain that the NIC can execute ([`runner`]), and copies its payloads into `buffer`, which has the
    /// space that `runner` named. `extents` is the region's memory, in the order of its addresses. `inline_max` is the
    /// number of bytes that a request can carry.
    ///
    /// # Errors
    /// An address is outside of `extents`, unless `terms` say otherwise.
    pub(super) fn translate(
        &mut self,
        chain: ChainView<'_>,
        extents: &[Extent],
        (buffer, inline_max): (&mut [u8], usize),
        terms: Terms,
    ) -> Result<(), Outside> {
        self.steps.clear();
        self.requests.clear();
        self.pieces.clear();
        let mut room = room(chain);
        let (mut is_aborted, mut has_read, mut offset) = (false, false, 0);
        for op in chain.ops() {
            let len = len(&op);
            let output = output(&op);
            let step = if is_aborted {
                Step::Ended(Status::Aborted)
            } else if op.code().is_atomic() && !op.target().raw().is_multiple_of(8) {
                Step::Ended(Status::Invalid)
            } else if output > room {
                Step::Ended(Status::TooLong)
            } else {
                match rkey(extents, op.target().raw(), len) {
                    None if !terms.is_final => return Err(Outside),
                    None => Step::Ended(Status::Access),
                    Some(rkey) => {
                        room -= output;
                        let request = self.requests.len() as u32;
                        let is_fenced = op.is_fenced() || terms.in_order && has_read;
                        has_read |= op.code() == Code::Read;
                        let own = (&mut buffer[offset..offset + len], offset);
                        let compare = self.push(&op, rkey, is_fenced, own, inline_max);
                        let at = offset;
                        offset += aligned(len);
                        Step::Posted { request, at, len: output, compare }
                    }
                }
            };
            is_aborted |= matches!(step, Step::Ended(status) if status.aborts());
            self.steps.push(step);
        }
        if let Some(last) = self.requests.last_mut() {
            last.send_flags |= is::SEND_SIGNALED;
        }
        Ok(())
    }

    /// Adds the request of an op. Returns what a CAS compares with.
    fn push(
        &mut self,
        op: &OpView<'_>,
        rkey: u32,
        is_fenced: bool,
        (own, offset): (&mut [u8], usize),
        inline_max: usize,
    ) -> Option<u64> {
        let remote_addr = op.target().raw();
        let mut request = IbvSendWr::new(0, if is_fenced { is::SEND_FENCE } else { 0 });
        let mut compare = None;
        match op.code() {
            Code::Read => {
                request.opcode = is::WR_RDMA_READ;
                request.wr = IbvRemote { rdma: IbvRdma { remote_addr, rkey } };
            }
            Code::Write => {
                request.opcode = is::WR_RDMA_WRITE;
                request.wr = IbvRemote { rdma: IbvRdma { remote_addr, rkey } };
                if own.len() <= inline_max {
                    request.send_flags |= is::SEND_INLINE;
                }
                let mut at = 0;
                for piece in op.payload() {
                    own[at..at + piece.len()].copy_from_slice(piece);
                    at += piece.len();
                }
            }
            Code::Cas => {
                let [first, second] = operands(op);
                let swap = if op.has(flag::COMPARE) { second } else { first };
                compare = Some(first);
                request.opcode = is::WR_ATOMIC_CMP_AND_SWP;
                let atomic = IbvAtomic { remote_addr, compare_add: first, swap, rkey };
                request.wr = IbvRemote { atomic };
            }
            Code::FetchAdd => {
                let [add, _] = operands(op);
                request.opcode = is::WR_ATOMIC_FETCH_AND_ADD;
                let atomic = IbvAtomic { remote_addr, compare_add: add, swap: 0, rkey };
                request.wr = IbvRemote { atomic };
            }
            Code::Allocate | Code::Retire => unreachable!("the NIC lacks them"),
        }
        self.requests.push(request);
        self.pieces.push(IbvSge { addr: offset as u64, length: own.len() as u32, lkey: 0 });
        compare
    }

    /// Numbers the requests, from `first` on, and places their pieces in the buffer that `whole` describes.
    pub(super) fn place(&mut self, first: u64, whole: IbvSge) {
        for ((request, piece), number) in self.requests.iter_mut().zip(&mut self.pieces).zip(first..) {
            request.wr_id = number;
            *piece = IbvSge { addr: whole.addr + piece.addr, length: piece.length, lkey: whole.lkey };
        }
    }

    /// What is needed to answer the chain once the list has completed.
    pub(super) fn steps(&self, steps: &mut Steps) {
        steps.0.clear();
        steps.0.extend_from_slice(&self.steps);
    }
}

/// The ops of a posted list.
#[derive(Clone, Default)]
pub(super) struct Steps(Vec<Step>);

impl Steps {
    /// Stores the reply of a list that has completed, with the outputs in `buffer`. If the node's NIC has refused a
    /// request, `refused` is its number in the list.
    pub(super) fn answer(&self, buffer: &[u8], refused: Option<u32>, reply: &mut Reply) {
        let filled = reply.fill(self.0.len(), |own| {
            own.clear();
            let (mut is_aborted, mut end) = (false, 0);
            for step in &self.0 {
                let (status, output) = match *step {
                    _ if is_aborted => (Status::Aborted, 0),
                    Step::Ended(status) => (status, 0),
                    Step::Posted { request, .. } if refused == Some(request) => (Status::Access, 0),
                    Step::Posted { at, len, compare, .. } => match compare {
                        Some(compare) if buffer[at..at + 8] != compare.to_ne_bytes() => {
                            (Status::CasFailed, len)
                        }
                        _ => (Status::Ok, len),
                    },
                };
                is_aborted |= status.aborts();
                end += output as u32;
                own.extend_from_slice(&[status as u8, 0, 0, 0]);
                own.extend_from_slice(&end.to_le_bytes());
            }
            for (place, step) in self.0.iter().enumerate() {
                let status = own[8 * place];
                if let Step::Posted { at, len, .. } = *step
                    && (status == Status::Ok as u8 || status == Status::CasFailed as u8)
                {
                    own.extend_from_slice(&buffer[at..at + len]);
                }
            }
        });
        filled.expect("the outputs fit the reply: longer READs were not posted");
    }
}

/// The operands of an atomic: the first, and the second if there is one.
fn operands(op: &OpView<'_>) -> [u64; 2] {
    let mut words = op
        .operands()
        .chunks_exact(8)
        .map(|word| u64::from_le_bytes(word.try_into().expect("a word has 8 bytes")));
    let first = words.next().expect("the chain is well-formed");
    [first, words.next().unwrap_or(0)]
}

/// Returns the device's key for `len` bytes at `at`, if one piece of the region's memory contains them.
fn rkey(extents: &[Extent], at: u64, len: usize) -> Option<u32> {
    let after = extents.partition_point(|extent| extent.at <= at);
    let extent = extents[..after].last()?;
    let offset = at - extent.at;
    (offset <= extent.len && len as u64 <= extent.len - offset).then_some(extent.rkey)
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_remote::op::{Mode, cas, fetch_add, read, write};
    use farside_remote::{Addr, ChainBuf, Key};
    use zerocopy::little_endian::U64;

    const EXTENTS: [Extent; 2] =
        [Extent { at: 4096, len: 4096, rkey: 7 }, Extent { at: 1 << 20, len: 1 << 20, rkey: 8 }];

    /// Translates a chain; returns the list and its buffer.
    fn translated(chain: ChainView<'_>, is_final: bool) -> Result<(List, Vec<u8>), Outside> {
        let Runner::Nic(size) = runner(chain, true) else { panic!("the NIC executes it") };
        let (mut list, mut buffer) = (List::default(), vec![0; size]);
        list.translate(chain, &EXTENTS, (&mut buffer, 16), Terms { in_order: false, is_final })
            .map(|()| (list, buffer))
    }

    #[test]
    fn a_chain_of_classic_ops_is_one_list_that_reports_once() {
        let (word, addend) = ([5u64, 6], 3.into());
        let mut buf = ChainBuf::new();
        let mut chain = buf.begin(Key::new(1, 2));
        chain.also(read(Addr::new(4100), 5));
        chain.also(write(Addr::new(1 << 20), &[9; 16]).fenced());
        chain.also(write(Addr::new((1 << 20) + 100), &[8; 17]));
        chain.also(cas(Mode::Eq, Addr::new(4096), &word[0], &word[1]));
        chain.also(fetch_add(Addr::new(4104), &addend));
        let (mut list, buffer) = translated(chain.view(), false).expect("inside");
        let opcodes: Vec<_> = list.requests.iter().map(|request| request.opcode).collect();
        assert_eq!(
            opcodes,
            [
                is::WR_RDMA_READ,
                is::WR_RDMA_WRITE,
                is::WR_RDMA_WRITE,
                is::WR_ATOMIC_CMP_AND_SWP,
                is::WR_ATOMIC_FETCH_AND_ADD
            ]
        );
        let flags: Vec<_> = list.requests.iter().map(|request| request.send_flags).collect();
        assert_eq!(flags, [0, is::SEND_FENCE | is::SEND_INLINE, 0, 0, is::SEND_SIGNALED]);
        // SAFETY: all bytes of the union were set.
        let remote: Vec<_> =
            list.requests.iter().map(|request| unsafe { request.wr.rdma }).map(|to| to.remote_addr).collect();
        assert_eq!(remote, [4100, 1 << 20, (1 << 20) + 100, 4096, 4104]);
        // SAFETY: as above.
        let cas = unsafe { list.requests[3].wr.atomic };
        assert_eq!((cas.compare_add, cas.swap, cas.rkey), (5, 6, 7));
        // SAFETY: as above.
        let add = unsafe { list.requests[4].wr.atomic };
        assert_eq!((add.compare_add, add.rkey), (3, 7));
        // SAFETY: as above.
        assert_eq!(unsafe { list.requests[1].wr.rdma }.rkey, 8);
        assert_eq!((&buffer[8..24], &buffer[24..41]), (&[9; 16][..], &[8; 17][..]));
        list.place(40, IbvSge { addr: 1000, length: 64, lkey: 3 });
        let pieces: Vec<_> = list.pieces.iter().map(|piece| (piece.addr, piece.length, piece.lkey)).collect();
        assert_eq!(pieces, [(1000, 5, 3), (1008, 16, 3), (1024, 17, 3), (1048, 8, 3), (1056, 8, 3)]);
        assert_eq!(
            list.requests.iter().map(|request| request.wr_id).collect::<Vec<_>>(),
            [40, 41, 42, 43, 44]
        );
    }

    #[test]
    fn a_chain_that_needs_its_order_is_fenced_after_each_read() {
        let mut buf = ChainBuf::new();
        let mut chain = buf.begin(Key::new(1, 2));
        chain.also(write(Addr::new(4096), b"x"));
        chain.also(read(Addr::new(4100), 5));
        chain.also(write(Addr::new(4096), b"y"));
        chain.also(read(Addr::new(4100), 5));
        let (mut list, mut buffer) = (List::default(), vec![0; 64]);
        for (in_order, fences) in [(true, [false, false, true, true]), (false, [false; 4])] {
            let terms = Terms { in_order, is_final: false };
            list.translate(chain.view(), &EXTENTS, (&mut buffer, 0), terms).expect("inside");
            let fenced = |request: &IbvSendWr| request.send_flags & is::SEND_FENCE != 0;
            assert_eq!(list.requests.iter().map(fenced).collect::<Vec<_>>(), fences);
        }
    }

    #[test]
    fn the_engine_executes_what_the_nic_cannot() {
        const WORD: &U64 = &U64::new(1);
        let chain = |build: &dyn Fn(&mut farside_remote::Chain<'_>)| {
            let mut buf = ChainBuf::new();
            let mut chain = buf.begin(Key::new(1, 2));
            build(&mut chain);
            [false, true].map(|nic_atomics| runner(chain.view(), nic_atomics))
        };
        let [engine, nic] = chain(&|chain| _ = chain.also(read(Addr::new(0), 9)));
        assert_eq!((engine, nic), (Runner::Nic(16), Runner::Nic(16)));
        let [engine, nic] = chain(&|chain| _ = chain.also(cas(Mode::Eq, Addr::new(0), WORD, WORD)));
        assert_eq!((engine, nic), (Runner::Engine, Runner::Nic(8)), "an atomic is for one of both");
        let [engine, nic] = chain(&|chain| _ = chain.also(read(Addr::new(0), 9).indirect()));
        assert_eq!(engine, Runner::Engine);
        assert!(
            matches!(nic, Runner::Nobody(reason) if reason.contains("op 0, an op with PRISM's extensions"))
        );
        let masked = |chain: &mut farside_remote::Chain<'_>| {
            chain.also(cas(Mode::Eq, Addr::new(0), WORD, WORD).masked(WORD, WORD));
        };
        let [_, nic] = chain(&masked);
        assert!(matches!(nic, Runner::Nobody(reason) if reason.contains("a masked CAS")));
        let [engine, _] = chain(&|chain| {
            chain.also(read(Addr::new(0), 1));
            chain.then(read(Addr::new(0), 1));
        });
        assert_eq!(engine, Runner::Engine);
    }

    #[test]
    fn a_read_that_does_not_fit_the_reply_is_not_posted() {
        let mut buf = ChainBuf::new();
        let mut chain = buf.begin(Key::new(1, 2));
        let outs: Vec<_> = (0..64).map(|_| chain.also(read(Addr::new(1 << 20), 60_000))).collect();
        let Runner::Nic(size) = runner(chain.view(), true) else { panic!("the NIC executes it") };
        assert_eq!(size, 60_000, "one READ fits");
        let (list, buffer) = translated(chain.view(), false).expect("inside");
        assert_eq!((list.requests.len(), list.requests[0].send_flags), (1, is::SEND_SIGNALED));
        let (mut steps, mut reply) = (Steps::default(), Reply::new());
        list.steps(&mut steps);
        steps.answer(&buffer, None, &mut reply);
        assert_eq!((reply.status(outs[0]), reply.status(outs[63])), (Status::Ok, Status::TooLong));
    }

    #[test]
    fn an_address_outside_the_region_aborts_the_rest() {
        for (at, len) in [(4095, 1), (8191, 2), (0, 1), (2 << 20, 1), ((1 << 20) + 1, 1 << 20)] {
            let mut buf = ChainBuf::new();
            let mut chain = buf.begin(Key::new(1, 2));
            let first = chain.also(read(Addr::new(4096), 2));
            let outside = chain.also(read(Addr::new(at), len.min(60_000)));
            if len > 60_000 {
                continue;
            }
            let last = chain.also(read(Addr::new(4096), 2));
            assert_eq!(translated(chain.view(), false).err(), Some(Outside));
            let (list, buffer) = translated(chain.view(), true).expect("strict");
            assert_eq!((list.requests.len(), list.requests[0].send_flags), (1, is::SEND_SIGNALED));
            let (mut steps, mut reply) = (Steps::default(), Reply::new());
            list.steps(&mut steps);
            steps.answer(&buffer, None, &mut reply);
            let statuses = [reply.status(first), reply.status(outside), reply.status(last)];
            assert_eq!(statuses, [Status::Ok, Status::Access, Status::Aborted]);
        }
    }

    #[test]
    fn replies_have_the_outputs_and_statuses_of_the_nic() {
        let word = [U64::new(5), U64::new(6)];
        let mut buf = ChainBuf::new();
        let mut chain = buf.begin(Key::new(1, 2));
        let bytes = chain.also(read(Addr::new(4100), 5));
        let wrote = chain.also(write(Addr::new(4100), b"x"));
        let fails = chain.also(cas(Mode::Eq, Addr::new(4096), &word[0], &word[1]));
        let swaps = chain.also(cas(Mode::Eq, Addr::new(4096), &word[0], &word[1]));
        let misplaced = chain.also(cas(Mode::Eq, Addr::new(4097), &word[0], &word[1]));
        let (list, mut buffer) = translated(chain.view(), false).expect("inside");
        buffer[..5].copy_from_slice(b"hello");
        buffer[16..24].copy_from_slice(&4u64.to_ne_bytes());
        buffer[24..32].copy_from_slice(&5u64.to_ne_bytes());
        let (mut steps, mut reply) = (Steps::default(), Reply::new());
        list.steps(&mut steps);
        steps.answer(&buffer, None, &mut reply);
        assert_eq!(reply.get(bytes), Ok(&b"hello"[..]));
        assert_eq!((reply.status(wrote), reply.status(fails)), (Status::Ok, Status::CasFailed));
        assert_eq!((reply.status(swaps), reply.status(misplaced)), (Status::Ok, Status::Invalid));
        assert_eq!((reply.get(fails), reply.get(swaps)), (Ok(&U64::new(4)), Ok(&U64::new(5))));
        steps.answer(&buffer, Some(1), &mut reply);
        assert_eq!(reply.get(bytes), Ok(&b"hello"[..]), "a request before the refused one was executed");
        assert_eq!((reply.status(wrote), reply.status(fails)), (Status::Access, Status::Aborted));
    }
}
