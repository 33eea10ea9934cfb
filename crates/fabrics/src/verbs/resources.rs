//! The objects of a device: each is created by a function of the library, and destroyed when it is dropped.
//!
//! Every object holds the objects that it was created from, so these outlive it.
//!
//! The library's functions may be called by any thread, also for one object at the same time.

use super::device::Unavailable;
use super::error::VerbsError;
use super::sys::{
    IbvAhAttr, IbvCompChannel, IbvContext, IbvCq, IbvGid, IbvGlobalRoute, IbvMr, IbvPd, IbvQp, IbvQpAttr,
    IbvQpCap, IbvQpInitAttr, IbvRecvWr, IbvSendWr, IbvSge, IbvSrq, IbvSrqInitAttr, IbvWc, Library, is,
    library,
};
use rustix::process::{Resource, getrlimit};
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::io::Error;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// Longest list that is posted at once.
const LIST_MAX: usize = farside_remote::wire::OPS_MAX;

/// Number of completions that are fetched at a time.
pub(crate) const COMPLETIONS_AT_ONCE: usize = 16;

/// An open device.
pub(crate) struct Context {
    raw: NonNull<IbvContext>,
    library: &'static Library,
}

// SAFETY: the library's functions may be called by any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens the device called `name`.
    pub(crate) fn open(name: &str) -> Result<Arc<Context>, VerbsError> {
        let library =
            library().map_err(|reason| VerbsError::Unavailable(Unavailable::Library(reason.to_owned())))?;
        let mut count: c_int = 0;
        // SAFETY: `count` is writable. The result is null or a list that is freed below.
        let list = unsafe { (library.ibv_get_device_list)(&raw mut count) };
        if list.is_null() {
            return Err(VerbsError::create("list the RDMA devices"));
        }
        let mut names = Vec::new();
        let mut opened = None;
        for place in 0..count.max(0) as usize {
            // SAFETY: the list has `count` devices, which live until the list is freed.
            let device = unsafe { *list.add(place) };
            // SAFETY: the device is of the list; its name ends with a zero byte and lives as long.
            let own = unsafe { CStr::from_ptr((library.ibv_get_device_name)(device)) }
                .to_string_lossy()
                .into_owned();
            if own == name && opened.is_none() {
                // SAFETY: the device is of the list. An open device stays when the list is freed.
                opened = Some(unsafe { (library.ibv_open_device)(device) });
            }
            names.push(own);
        }
        let error = Error::last_os_error();
        // SAFETY: the list is of `ibv_get_device_list`, and no device of it is used any more.
        unsafe { (library.ibv_free_device_list)(list) };
        match opened.map(NonNull::new) {
            Some(Some(raw)) => Ok(Arc::new(Context { raw, library })),
            Some(None) => Err(VerbsError::Create("open the RDMA device", error)),
            None => Err(VerbsError::NoSuchDevice(name.to_owned(), names)),
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: all objects of the device hold this context, so none is left.
        let _closed = unsafe { (self.library.ibv_close_device)(self.raw.as_ptr()) };
    }
}

/// A protection domain: queue pairs of it reach only memory that is registered with it.
pub(crate) struct Domain {
    raw: NonNull<IbvPd>,
    context: Arc<Context>,
}

// SAFETY: the library's functions may be called by any thread.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Arc<Domain>, VerbsError> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.library.ibv_alloc_pd)(context.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::create("create a protection domain"))?;
        Ok(Arc::new(Domain { raw, context: Arc::clone(context) }))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: all queue pairs and registrations of the domain hold it, so none is left.
        let _freed = unsafe { (self.context.library.ibv_dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// Memory that the device may access.
pub(crate) struct Registered {
    raw: NonNull<IbvMr>,
    domain: Arc<Domain>,
    lkey: u32,
    rkey: u32,
}

// SAFETY: the library's functions may be called by any thread.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    /// Registers `len` bytes at `start`. Requests name them by the addresses from `named` on.
    ///
    /// # Safety
    /// The bytes are mapped until the registration is dropped, and whatever the device writes there with the rights of
    /// `access` is allowed: no reference to these bytes exists that forbids it.
    pub(crate) unsafe fn new(
        domain: &Arc<Domain>,
        start: *mut u8,
        len: usize,
        named: u64,
        access: c_uint,
    ) -> Result<Registered, VerbsError> {
        let library = domain.context.library;
        // SAFETY: the domain is open, and the caller keeps the bytes mapped.
        let raw = unsafe {
            (library.ibv_reg_mr_iova)(domain.raw.as_ptr(), start.cast(), len, named, access as c_int)
        };
        let Some(raw) = NonNull::new(raw) else {
            let error = Error::last_os_error();
            let limit = getrlimit(Resource::Memlock).current;
            return Err(VerbsError::Register { bytes: len, error, limit });
        };
        // SAFETY: the library returned a registration, which lives until it is deregistered.
        let (lkey, rkey) = unsafe { (raw.as_ref().lkey, raw.as_ref().rkey) };
        Ok(Registered { raw, domain: Arc::clone(domain), lkey, rkey })
    }

    /// The key for requests of this process.
    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The key for requests of other machines.
    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: the registration is dropped once. When the function returns, the device accesses the memory no more.
        let code = unsafe { (self.domain.context.library.ibv_dereg_mr)(self.raw.as_ptr()) };
        // The memory is about to be given to others: going on would let clients of the device reach it.
        assert!(is_gone(code), "the RDMA device keeps registered memory: {}", Error::from_raw_os_error(code));
    }
}

/// A channel of completion events, with a descriptor to sleep on.
pub(crate) struct Channel {
    raw: NonNull<IbvCompChannel>,
    context: Arc<Context>,
}

// SAFETY: the library's functions may be called by any thread.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Channel {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Arc<Channel>, VerbsError> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.library.ibv_create_comp_channel)(context.raw.as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::create("create a completion channel"))?;
        let channel = Channel { raw, context: Arc::clone(context) };
        let flags = rustix::fs::fcntl_getfl(&channel)
            .and_then(|flags| rustix::fs::fcntl_setfl(&channel, flags | rustix::fs::OFlags::NONBLOCK));
        flags.map_err(|errno| VerbsError::Create("set up a completion channel", errno.into()))?;
        Ok(Arc::new(channel))
    }

    /// Takes all events that wait in the channel.
    pub(crate) fn take_events(&self) {
        loop {
            let (mut queue, mut own): (*mut IbvCq, *mut c_void) = (null_mut(), null_mut());
            let library = self.context.library;
            // SAFETY: the channel is open, and both places are writable.
            let code = unsafe { (library.ibv_get_cq_event)(self.raw.as_ptr(), &raw mut queue, &raw mut own) };
            if code != 0 {
                return; // None is left: the descriptor does not block.
            }
            // SAFETY: the event is of this queue, which cannot be destroyed before its events are acknowledged, and
            // each event is acknowledged once.
            unsafe { (library.ibv_ack_cq_events)(queue, 1) };
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is open while it is borrowed, and its descriptor with it.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: all queues of the channel hold it, so none is left.
        let _destroyed = unsafe { (self.context.library.ibv_destroy_comp_channel)(self.raw.as_ptr()) };
    }
}

/// A completion queue.
pub(crate) struct Completions {
    raw: NonNull<IbvCq>,
    channel: Arc<Channel>,
}

// SAFETY: the library's functions may be called by any thread.
unsafe impl Send for Completions {}
// SAFETY: as above.
unsafe impl Sync for Completions {}

impl Completions {
    /// Creates a queue for `len` completions.
    pub(crate) fn new(channel: &Arc<Channel>, len: u32) -> Result<Arc<Completions>, VerbsError> {
        let (context, create) = (channel.context.raw.as_ptr(), channel.context.library.ibv_create_cq);
        // SAFETY: the context and the channel are open.
        let raw = unsafe { create(context, len as c_int, null_mut(), channel.raw.as_ptr(), 0) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::create("create a completion queue"))?;
        Ok(Arc::new(Completions { raw, channel: Arc::clone(channel) }))
    }

    /// Fetches completions into `out`, and returns how many.
    ///
    /// # Errors
    /// The queue is unusable.
    #[inline]
    pub(crate) fn poll(&self, out: &mut [IbvWc; COMPLETIONS_AT_ONCE]) -> Result<usize, VerbsError> {
        // SAFETY: the queue is open, so its context is; the array has as many places as the function may fill.
        let count = unsafe {
            let poll = self.raw.as_ref().context.as_ref().expect("an open queue has a context").ops.poll_cq;
            poll(self.raw.as_ptr(), out.len() as c_int, out.as_mut_ptr())
        };
        usize::try_from(count).map_err(|_| VerbsError::Lost("its completion queue is unusable"))
    }

    /// Makes the channel report the next completion.
    ///
    /// # Errors
    /// The device refuses.
    pub(crate) fn arm(&self) -> Result<(), VerbsError> {
        // SAFETY: the queue is open, so its context is.
        let code = unsafe {
            let arm =
                self.raw.as_ref().context.as_ref().expect("an open queue has a context").ops.req_notify_cq;
            arm(self.raw.as_ptr(), 0)
        };
        if code == 0 { Ok(()) } else { Err(VerbsError::Lost("its completion queue cannot be armed")) }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: all queue pairs of the queue hold it, so none is left, and all its events are acknowledged.
        let _destroyed = unsafe { (self.channel.context.library.ibv_destroy_cq)(self.raw.as_ptr()) };
    }
}

/// A queue of receive buffers that several queue pairs share.
pub(crate) struct SharedReceives {
    raw: NonNull<IbvSrq>,
    domain: Arc<Domain>,
}

// SAFETY: the library's functions may be called by any thread.
unsafe impl Send for SharedReceives {}
// SAFETY: as above.
unsafe impl Sync for SharedReceives {}

impl SharedReceives {
    pub(crate) fn new(domain: &Arc<Domain>, len: u32) -> Result<Arc<SharedReceives>, VerbsError> {
        let mut request = IbvSrqInitAttr { srq_context: null_mut(), max_wr: len, max_sge: 1, srq_limit: 0 };
        // SAFETY: the domain is open, and the request is complete.
        let raw = unsafe { (domain.context.library.ibv_create_srq)(domain.raw.as_ptr(), &raw mut request) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::create("create a shared receive queue"))?;
        Ok(Arc::new(SharedReceives { raw, domain: Arc::clone(domain) }))
    }

    /// Posts a buffer.
    ///
    /// # Safety
    /// `buffer` is registered memory, which nothing else uses until the completion with this `id`.
    pub(crate) unsafe fn post(&self, id: u64, mut buffer: IbvSge) -> Result<(), VerbsError> {
        let mut request = IbvRecvWr { wr_id: id, next: null_mut(), sg_list: &raw mut buffer, num_sge: 1 };
        let mut bad = null_mut();
        // SAFETY: the queue is open, so its context is. The request and its buffer's description live during the call.
        let code = unsafe {
            let post =
                self.raw.as_ref().context.as_ref().expect("an open queue has a context").ops.post_srq_recv;
            post(self.raw.as_ptr(), &raw mut request, &raw mut bad)
        };
        if code == 0 { Ok(()) } else { Err(VerbsError::Lost("it accepts no receive buffer")) }
    }
}

impl Drop for SharedReceives {
    fn drop(&mut self) {
        // SAFETY: all queue pairs of the queue hold it, so none is left.
        let _destroyed = unsafe { (self.domain.context.library.ibv_destroy_srq)(self.raw.as_ptr()) };
    }
}

/// A reliable connected queue pair.
pub(crate) struct Pair {
    raw: NonNull<IbvQp>,
    domain: Arc<Domain>,
    number: u32,
    inline_max: u32,
    _completions: [Arc<Completions>; 2],
    _receives: Option<Arc<SharedReceives>>,
}

// SAFETY: the library's functions may be called by any thread.
unsafe impl Send for Pair {}
// SAFETY: as above.
unsafe impl Sync for Pair {}

/// Sizes and queues of a new queue pair.
pub(crate) struct NewPair<'a> {
    /// Queue for the completions of sent requests.
    pub(crate) sent: &'a Arc<Completions>,
    /// Queue for the completions of receives.
    pub(crate) received: &'a Arc<Completions>,
    /// Shared receive queue; without one, the pair has `receives` places of its own.
    pub(crate) shared: Option<&'a Arc<SharedReceives>>,
    /// Number of places for requests.
    pub(crate) sends: u32,
    /// Number of places for receives.
    pub(crate) receives: u32,
    /// Wanted number of bytes that a request can carry itself.
    pub(crate) inline: u32,
}

/// One end of a connection, as the other end must know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct End {
    /// Number of the queue pair.
    pub(crate) pair: u32,
    /// First packet number that it sends.
    pub(crate) first: u32,
    /// Local identifier of its port; 0 on Ethernet.
    pub(crate) lid: u16,
    /// Global identifier of its port.
    pub(crate) gid: [u8; 16],
    /// Number of READs and atomics that it can have in execution for the other end.
    pub(crate) reads: u8,
}

/// The port of this machine that a pair uses, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) port: u8,
    pub(crate) gid_index: u8,
    /// Whether packets carry global identifiers, as they always do on Ethernet.
    pub(crate) is_global: bool,
    /// Code of the packet size, from 1 (256 bytes) to 5 (4096 bytes).
    pub(crate) mtu: u8,
}

/// Time without an acknowledgement after which a packet is sent again: 4.096 us times 2 to this power, so 67 ms.
const ACK_TIMEOUT: u8 = 14;
/// Number of times that a packet is sent again before the pair breaks.
const RETRIES: u8 = 7;
/// Number of times that a message is sent again if the other end has no receive buffer: this number means for ever.
const RETRIES_UNREADY: u8 = 7;
/// Code of the pause before that: 0.64 ms.
const UNREADY_TIMER: u8 = 12;
/// Number of hops that a packet may take.
const HOPS: u8 = 64;

impl Pair {
    pub(crate) fn new(domain: &Arc<Domain>, new: &NewPair<'_>) -> Result<Pair, VerbsError> {
        let mut inline = new.inline;
        loop {
            let mut request = IbvQpInitAttr {
                qp_context: null_mut(),
                send_cq: new.sent.raw.as_ptr(),
                recv_cq: new.received.raw.as_ptr(),
                srq: new.shared.map_or(null_mut(), |shared| shared.raw.as_ptr()),
                cap: IbvQpCap {
                    max_send_wr: new.sends,
                    max_recv_wr: if new.shared.is_some() { 0 } else { new.receives },
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline_data: inline,
                },
                qp_type: is::QPT_RC,
                sq_sig_all: 0,
            };
            // SAFETY: the domain and the queues are open, and the request is complete.
            let raw =
                unsafe { (domain.context.library.ibv_create_qp)(domain.raw.as_ptr(), &raw mut request) };
            let Some(raw) = NonNull::new(raw) else {
                if inline > 0 {
                    inline /= 2; // The device's limit is known only by trying.
                    continue;
                }
                return Err(VerbsError::create("create a queue pair"));
            };
            // SAFETY: the library returned a queue pair, which lives until it is destroyed.
            let number = unsafe { raw.as_ref().qp_num };
            return Ok(Pair {
                raw,
                domain: Arc::clone(domain),
                number,
                inline_max: inline.min(request.cap.max_inline_data),
                _completions: [Arc::clone(new.sent), Arc::clone(new.received)],
                _receives: new.shared.cloned(),
            });
        }
    }

    /// Number of the pair at its device.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Number of bytes that a request can carry itself.
    pub(crate) fn inline_max(&self) -> usize {
        self.inline_max as usize
    }

    /// Prepares the pair for receives. The other end gets the rights of `access`.
    pub(crate) fn begin(&self, way: &Way, access: c_uint) -> Result<(), VerbsError> {
        let mut to = IbvQpAttr {
            qp_state: is::QPS_INIT,
            qp_access_flags: access,
            port_num: way.port,
            ..IbvQpAttr::default()
        };
        let mask = is::QP_STATE | is::QP_PKEY_INDEX | is::QP_PORT | is::QP_ACCESS_FLAGS;
        self.change(&mut to, mask, "prepare a queue pair")
    }

    /// Connects the pair, which sends its first packet with the number `first`. `reads` is the number of READs and
    /// atomics of the other end that it executes at a time.
    pub(crate) fn connect(&self, way: &Way, first: u32, reads: u8, other: &End) -> Result<(), VerbsError> {
        let grh = IbvGlobalRoute {
            dgid: IbvGid(other.gid),
            sgid_index: way.gid_index,
            hop_limit: HOPS,
            ..IbvGlobalRoute::default()
        };
        let path = IbvAhAttr {
            grh,
            dlid: other.lid,
            is_global: u8::from(way.is_global),
            port_num: way.port,
            ..IbvAhAttr::default()
        };
        let mut to = IbvQpAttr {
            qp_state: is::QPS_RTR,
            path_mtu: way.mtu.into(),
            dest_qp_num: other.pair,
            rq_psn: other.first,
            max_dest_rd_atomic: reads,
            min_rnr_timer: UNREADY_TIMER,
            ah_attr: path,
            ..IbvQpAttr::default()
        };
        let mask = is::QP_STATE
            | is::QP_AV
            | is::QP_PATH_MTU
            | is::QP_DEST_QPN
            | is::QP_RQ_PSN
            | is::QP_MAX_DEST_RD_ATOMIC
            | is::QP_MIN_RNR_TIMER;
        self.change(&mut to, mask, "connect a queue pair")?;
        let mut to = IbvQpAttr {
            qp_state: is::QPS_RTS,
            timeout: ACK_TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RETRIES_UNREADY,
            sq_psn: first,
            max_rd_atomic: other.reads,
            ..IbvQpAttr::default()
        };
        let mask = is::QP_STATE
            | is::QP_TIMEOUT
            | is::QP_RETRY_CNT
            | is::QP_RNR_RETRY
            | is::QP_SQ_PSN
            | is::QP_MAX_QP_RD_ATOMIC;
        self.change(&mut to, mask, "start a queue pair")
    }

    /// Breaks the pair: requests that have not completed complete with an error.
    pub(crate) fn break_off(&self) {
        let mut to = IbvQpAttr { qp_state: is::QPS_ERR, ..IbvQpAttr::default() };
        let _broken_already = self.change(&mut to, is::QP_STATE, "break a queue pair");
    }

    fn change(&self, to: &mut IbvQpAttr, mask: c_uint, doing: &'static str) -> Result<(), VerbsError> {
        // SAFETY: the pair is open, and the attributes that the mask names are set.
        let code =
            unsafe { (self.domain.context.library.ibv_modify_qp)(self.raw.as_ptr(), to, mask as c_int) };
        match code {
            0 => Ok(()),
            -1 => Err(VerbsError::create(doing)),
            errno => Err(VerbsError::Create(doing, Error::from_raw_os_error(errno))),
        }
    }

    /// Posts a receive buffer of the pair's own.
    ///
    /// # Safety
    /// `buffer` is registered memory, which nothing else uses until the completion with this `id`.
    pub(crate) unsafe fn post_receive(&self, id: u64, mut buffer: IbvSge) -> Result<(), VerbsError> {
        let mut request = IbvRecvWr { wr_id: id, next: null_mut(), sg_list: &raw mut buffer, num_sge: 1 };
        let mut bad = null_mut();
        // SAFETY: the pair is open, so its context is. The request and its buffer's description live during the call.
        let code = unsafe {
            let post = self.raw.as_ref().context.as_ref().expect("an open pair has a context").ops.post_recv;
            post(self.raw.as_ptr(), &raw mut request, &raw mut bad)
        };
        if code == 0 { Ok(()) } else { Err(VerbsError::Lost("it accepts no receive buffer")) }
    }

    /// Posts `requests` as one list, with one doorbell. Links them, and each to its piece of memory, if it has one.
    ///
    /// # Safety
    /// The memory of each piece is registered with the pair's domain, or the request is inline and the memory is
    /// readable now; and nothing else uses the memory of pieces that are not inline until the list has completed.
    pub(crate) unsafe fn post(
        &self,
        requests: &mut [IbvSendWr],
        pieces: &mut [IbvSge],
    ) -> Result<(), VerbsError> {
        debug_assert!(requests.len() == pieces.len() && requests.len() <= LIST_MAX);
        let Some(count) = requests.len().checked_sub(1) else { return Ok(()) };
        let (first, pieces) = (requests.as_mut_ptr(), pieces.as_mut_ptr());
        for place in 0..=count {
            // SAFETY: both arrays have more than `place` entries.
            let request = unsafe { &mut *first.add(place) };
            // SAFETY: as above; the next entry exists unless this one is the last.
            request.next = if place == count { null_mut() } else { unsafe { first.add(place + 1) } };
            // SAFETY: as above.
            request.sg_list = unsafe { pieces.add(place) };
            // SAFETY: as above.
            request.num_sge = c_int::from(unsafe { (*pieces.add(place)).length } > 0);
        }
        let mut bad = null_mut();
        // SAFETY: the pair is open, so its context is. The linked requests live during the call, and the caller keeps
        // the memory of their pieces.
        let code = unsafe {
            let post = self.raw.as_ref().context.as_ref().expect("an open pair has a context").ops.post_send;
            post(self.raw.as_ptr(), first, &raw mut bad)
        };
        if code == 0 { Ok(()) } else { Err(VerbsError::Lost("it accepts no request")) }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.break_off();
        // SAFETY: the pair is destroyed once. When the function returns, no request of it or to it is executed any
        // more.
        let code = unsafe { (self.domain.context.library.ibv_destroy_qp)(self.raw.as_ptr()) };
        // The memory that the pair reaches may be given to others now.
        assert!(is_gone(code), "the RDMA device keeps a queue pair: {}", Error::from_raw_os_error(code));
    }
}

/// Whether an object is destroyed, by the code of the function that destroys it. When a device is removed, the kernel
/// destroys all its objects, and the functions then report these errors.
fn is_gone(code: c_int) -> bool {
    matches!(code, 0 | libc::EIO | libc::ENODEV)
}

/// Text of a completion's status.
pub(crate) fn status_text(status: c_uint) -> String {
    let Ok(library) = library() else { return format!("status {status}") };
    // SAFETY: the function returns a text for every number; it is static and ends with a zero byte.
    let text = unsafe { CStr::from_ptr((library.ibv_wc_status_str)(status)) };
    text.to_string_lossy().into_owned()
}
