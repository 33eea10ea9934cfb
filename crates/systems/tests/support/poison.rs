//! A node that overwrites every buffer with poison before it frees the buffer, with clients that put and clients that
//! get. Clients that put also overwrite every buffer before they reuse it. A client that reads poison has followed a
//! pointer into such a buffer. Clients run in threads ([`play`]), or between two accesses of a client that gets
//! ([`interrupt`]).

use super::observed::{Made, Observed, Observer};
use farside_fabrics::direct::{Control, Direct};
use farside_fabrics::executor::block_on;
use farside_fabrics::local::{self, LocalNode};
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::runner::Runs;
use farside_node::{Node, NodeMemory, Progress};
use farside_remote::arena::REGIONS_MAX;
use farside_remote::arena::session::SessionId;
use farside_remote::arena::state::{Stage, State};
use farside_remote::control::{Ask, NodeInfo};
use farside_remote::fabric::ServiceId;
use farside_remote::{Fabric, FabricError, Memory, NodeId, clock::Clock};
use farside_systems::kv::prism_kv::service::PrismKvKind;
use farside_systems::kv::prism_kv::{KIND, PrismKv};
use farside_systems::kv::{Kv, KvError};
use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const POISON: u8 = 0xdd;
const KEYS: u32 = 8;

/// Numbers of operations and of poisoned buffers in a run.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    pub(crate) poisoned: u64,
    pub(crate) reused: u64,
    pub(crate) puts: u64,
    pub(crate) gets: u64,
    pub(crate) slow_gets: u64,
}

/// Runs clients and the node for the time `during`: clients put and get, and the node reclaims buffers.
///
/// # Errors
/// An operation failed, or a get returned bytes that no client put.
pub(crate) fn play(during: Duration) -> Result<Figures, String> {
    let home = Arc::new(Home::new());
    let node: Arc<dyn LocalNode> = Arc::clone(&home) as _;
    let (stop, puts, gets, slow_gets) =
        (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let reused = Arc::new(AtomicU64::new(0));
    let found = Mutex::new(None);
    let note = |what: String| {
        found.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(what);
        stop.store(true, Ordering::Relaxed);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| home.tend(&stop));
        for writer in 0..2 {
            let (home, reused, stop, puts, note) = (&home, &reused, &stop, &puts, &note);
            scope.spawn(move || {
                let endpoint = Rc::new(home.endpoint(PoisoningReuse(Arc::clone(reused))));
                put_all(&endpoint, writer, stop, puts).unwrap_or_else(note);
            });
        }
        scope.spawn(|| {
            let endpoint = Rc::new(local::connect(&node, NodeId(0)).expect("a session"));
            get_all(&endpoint, &stop, &gets).unwrap_or_else(note);
        });
        scope.spawn(|| {
            let endpoint = Rc::new(home.endpoint(Slow::default()));
            get_all(&endpoint, &stop, &slow_gets).unwrap_or_else(note);
        });
        let since = Instant::now();
        while since.elapsed() < during && !stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
        stop.store(true, Ordering::Relaxed);
    });
    match found.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(what) => Err(what),
        None => Ok(Figures {
            poisoned: home.memory.observer.0.load(Ordering::Relaxed),
            reused: reused.load(Ordering::Relaxed),
            puts: puts.into_inner(),
            gets: gets.into_inner(),
            slow_gets: slow_gets.into_inner(),
        }),
    }
}

fn put_all<M: Runs>(
    endpoint: &Rc<Direct<M>>,
    writer: u32,
    stop: &AtomicBool,
    puts: &AtomicU64,
) -> Result<(), String> {
    let mut client = open(endpoint);
    for n in 0u32.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let len = if n.is_multiple_of(64) { 62_000 } else { [100, 900, 3000][n as usize % 3] };
        let value = vec![(n % 200) as u8; len];
        let key = ((n + writer) % KEYS).to_be_bytes();
        match block_on(endpoint, client.put(&key, &value)) {
            Ok(()) => _ = puts.fetch_add(1, Ordering::Relaxed),
            Err(KvError::OutOfMemory) => {} // All memory waits for the slow reader, or the node has stopped.
            Err(error) => return Err(format!("a put: {error}")),
        }
    }
    Ok(())
}

fn get_all<M: Runs>(endpoint: &Rc<Direct<M>>, stop: &AtomicBool, gets: &AtomicU64) -> Result<(), String> {
    let mut client = open(endpoint);
    for n in 0u32.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let got = block_on(endpoint, client.get(&(n % KEYS).to_be_bytes()));
        let value = got.map_err(|error| format!("a get: {error}"))?.map(|item| item.value.to_vec());
        if let Some(value) = value
            && value.iter().any(|&byte| byte != value[0] || byte == POISON)
        {
            return Err(format!("a get of {} bytes returned bytes that no client put", value.len()));
        }
        gets.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// Number of puts of other keys before the put of the key that is got, and of those after it. More than a session
/// keeps to reuse them.
const OTHER_PUTS: u32 = 300;

/// Gets a key once for each read of its memory that the get makes. Before this read, another client puts other keys,
/// then the key, then others again, and the node reclaims buffers after each put. All this is in one thread. Returns
/// the number of gets.
///
/// # Errors
/// A get did not return a value of its key.
pub(crate) fn interrupt() -> Result<u32, String> {
    const KEY: [u8; 4] = 0_u32.to_be_bytes();
    let [old, new, other] = [1, 2, 3].map(|byte| vec![byte; 900]);
    let home = Arc::new(Home::new());
    let endpoint = Rc::new(home.endpoint(PoisoningReuse(Arc::default())));
    let writer = Rc::new(RefCell::new(open(&endpoint)));
    let put = move |home: &Home, key: &[u8], value: &[u8]| {
        block_on(&endpoint, writer.borrow_mut().put(key, value)).expect("memory for all puts of a get");
        home.reclaim();
    };
    let interrupts = {
        let (home, put, new) = (Arc::clone(&home), put.clone(), new.clone());
        let others = move || {
            let put_others =
                || (0..OTHER_PUTS).for_each(|n| put(&home, &(1 + n % (KEYS - 1)).to_be_bytes(), &other));
            put_others();
            put(&home, &KEY, &new);
            put_others();
        };
        Rc::new(Interrupts { reads_left: Cell::new(None), others: Box::new(others) })
    };
    let reader = Rc::new(home.endpoint(Rc::clone(&interrupts)));
    let mut client = open(&reader);
    for reads in 0.. {
        put(&home, &KEY, &old);
        interrupts.reads_left.set(Some(reads));
        let got = block_on(&reader, client.get(&KEY));
        let value = got.map_err(|error| format!("a get: {error}"))?.map(|item| item.value.to_vec());
        if !value.as_ref().is_some_and(|value| [&old, &new].contains(&value)) {
            let what = value.map(|value| (value.len(), value.first().copied()));
            return Err(format!("a get, interrupted after {reads} reads, returned (length, byte): {what:?}"));
        }
        if interrupts.reads_left.take().is_some() {
            return Ok(reads);
        }
    }
    unreachable!("a get makes fewer reads");
}

fn open<F: Fabric + Clock>(endpoint: &Rc<F>) -> PrismKv<Rc<F>> {
    block_on((), PrismKv::open(Rc::clone(endpoint), NodeId(0), "s")).expect("the store exists")
}

/// Observer that overwrites each buffer that is about to go onto a free list.
#[derive(Default)]
struct Poisoning(AtomicU64);

impl Observer for Poisoning {
    /// Detects that a class's list head is about to point to a new buffer. Until then only the node holds this buffer.
    fn before(&self, memory: &Mapping, at: u64, made: &Made<'_>) {
        const REGION_SIZE: u64 = 4096;
        const CLASSES: u64 = 128;
        const PUTTING: u64 = 2;
        let Made::Exchange { new, .. } = *made else { return };
        let offset = at % REGION_SIZE;
        let is_head =
            at < REGION_SIZE * (1 + u64::from(REGIONS_MAX)) && offset >= CLASSES && offset.is_multiple_of(64);
        if !is_head || new as u64 & 0xf != PUTTING {
            return;
        }
        let first = new as u64 & ((1 << 48) - 1) & !0xf;
        let Ok(found) = memory.arena().buffer_at(first);
        let (_, buffer) = found.expect("a list entry is a buffer");
        let Ok(()) = memory.write(buffer.at, &vec![POISON; buffer.class.size as usize]);
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl NodeMemory for Observed<Poisoning> {
    fn discard(&self, index: u32) -> Result<(), Infallible> {
        NodeMemory::discard(&*self.mapping, index)
    }
}

/// A node in this process with one store, run by a thread of the test.
struct Home {
    memory: Observed<Poisoning>,
    node: Mutex<Node<Observed<Poisoning>>>,
}

impl Home {
    fn new() -> Home {
        let mapping = Arc::new(Mapping::create(32 << 20, Pages::Small).expect("memory"));
        let memory = Observed { mapping, observer: Poisoning::default() };
        let node = Node::new(&memory, vec![Box::new(PrismKvKind)], NodeInfo::default());
        let home = Home { memory, node: Mutex::new(node) };
        let parameters = r#"{"items": 100}"#.into();
        home.ask(Ask::CreateStore { name: "s".into(), kind: KIND.into(), parameters, quota: 16 << 20 })
            .expect("a store");
        home
    }

    fn node(&self) -> MutexGuard<'_, Node<Observed<Poisoning>>> {
        self.node.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, ask: Ask) -> Result<farside_remote::control::Answer, String> {
        let mut node = self.node();
        let ticket = node.ask(ask, [3, 3]);
        loop {
            if let Some((to, answer)) = node.answer() {
                assert_eq!(to, ticket, "one request at a time");
                return answer;
            }
            let Ok(_) = node.step(&self.memory);
        }
    }

    fn tend(&self, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            self.reclaim();
            std::thread::yield_now();
        }
    }

    fn reclaim(&self) {
        let mut node = self.node();
        node.poll_shared();
        for _ in 0..256 {
            if node.step(&self.memory) == Ok(Progress::Idle) {
                break;
            }
        }
    }

    /// Creates an endpoint whose accesses `observer` sees.
    fn endpoint<O: Observer>(self: &Arc<Self>, observer: O) -> Direct<Observed<O>> {
        let session = self.open_session().expect("a session is free");
        let memory = Observed { mapping: Arc::clone(&self.memory.mapping), observer };
        let control = Box::new(Calls { home: Arc::clone(self), session });
        Direct::new(memory, control, Arc::new(AtomicBool::new(false)), NodeId(0), session)
    }
}

impl LocalNode for Home {
    fn memory(&self) -> &Arc<Mapping> {
        &self.memory.mapping
    }
    fn open_session(&self) -> Result<SessionId, FabricError> {
        let Ok(opened) = self.node().open_session(&self.memory, std::process::id(), 0);
        Ok(opened.expect("a session is free"))
    }
    fn close_session(&self, session: SessionId) {
        self.node().end_session(session, true);
    }
    fn call(
        &self,
        _: SessionId,
        _: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        let ask = serde_json::from_slice(request).expect("a request");
        let answered = self.ask(ask).map_err(FabricError::Refused)?;
        *answer = serde_json::to_vec(&answered).expect("plain data");
        Ok(())
    }
    fn ring(&self) {}
}

struct Calls {
    home: Arc<Home>,
    session: SessionId,
}

impl Control for Calls {
    fn call<'a>(
        &'a self,
        service: ServiceId,
        request: &'a [u8],
        answer: &'a mut Vec<u8>,
    ) -> Pin<Box<dyn Future<Output = Result<(), FabricError>> + 'a>> {
        Box::pin(async move { self.home.call(self.session, service, request, answer) })
    }
    fn ring(&self) {}
}

impl Drop for Calls {
    fn drop(&mut self) {
        self.home.close_session(self.session);
    }
}

/// Observer that overwrites each buffer that its session is about to reuse.
struct PoisoningReuse(Arc<AtomicU64>);

impl Observer for PoisoningReuse {
    /// Detects that a RETIRED buffer is about to become LIVE. Until then only the session holds this buffer.
    fn before(&self, memory: &Mapping, at: u64, made: &Made<'_>) {
        let Made::Exchange { old, new } = *made else { return };
        let (before, after) = (State::unpack(old), State::unpack(new));
        let arena = memory.arena();
        let Some(index) = arena.geometry().segment_of(at) else { return };
        if (before.stage, after.stage) != (Stage::Retired, Stage::Live) || before.count + 1 != after.count {
            return;
        }
        let ordinal = (at - arena.geometry().segment_at(index)) / 16;
        let Ok(Some((buffer, _))) = arena.buffer_state(index, ordinal as u32) else { return };
        if buffer.state_at() == at {
            let Ok(()) = memory.write(buffer.at, &vec![POISON; buffer.class.size as usize]);
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Observer that often pauses before a read, so that other clients act between two accesses.
#[derive(Default)]
struct Slow(Cell<u64>);

impl Observer for Slow {
    fn before(&self, _: &Mapping, _: u64, made: &Made<'_>) {
        if !matches!(made, Made::Read) {
            return;
        }
        let count = self.0.replace(self.0.get() + 1);
        if count.is_multiple_of(7) {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

/// Observer that lets others act before one read.
struct Interrupts {
    /// Number of reads before this one. `None`: no read is interrupted.
    reads_left: Cell<Option<u32>>,
    others: Box<dyn Fn()>,
}

impl Observer for Rc<Interrupts> {
    fn before(&self, _: &Mapping, _: u64, made: &Made<'_>) {
        if !matches!(made, Made::Read) {
            return;
        }
        match self.reads_left.get() {
            Some(0) => {
                self.reads_left.set(None);
                (self.others)();
            }
            Some(reads) => self.reads_left.set(Some(reads - 1)),
            None => {}
        }
    }
}
