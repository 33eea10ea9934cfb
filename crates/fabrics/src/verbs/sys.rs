//! The C interface of libibverbs, which is loaded when a device is first needed.
//!
//! The library is optional: a program that uses no RDMA device builds and starts without it. The layouts below are the
//! library's binary interface (version 1.1), which has not changed since 2006; a test compares their offsets with those
//! that a C compiler prints for `infiniband/verbs.h`.
//!
//! Invariant: a loaded library is never unloaded, so its functions may be called until the process exits.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// File name of the library, as the loader finds it.
pub(crate) const LIBRARY: &CStr = c"libibverbs.so.1";

/// An opaque device of the library's list.
#[repr(C)]
pub(crate) struct IbvDevice {
    _opaque: [u8; 0],
}

/// The first functions of an open device's table; the library's own inline functions call through it.
#[repr(C)]
pub(crate) struct IbvContextOps {
    _compat_first: [*const c_void; 11],
    pub(crate) poll_cq: unsafe extern "C" fn(*mut IbvCq, c_int, *mut IbvWc) -> c_int,
    pub(crate) req_notify_cq: unsafe extern "C" fn(*mut IbvCq, c_int) -> c_int,
    _compat_second: [*const c_void; 7],
    pub(crate) post_srq_recv: unsafe extern "C" fn(*mut IbvSrq, *mut IbvRecvWr, *mut *mut IbvRecvWr) -> c_int,
    _compat_third: [*const c_void; 4],
    pub(crate) post_send: unsafe extern "C" fn(*mut IbvQp, *mut IbvSendWr, *mut *mut IbvSendWr) -> c_int,
    pub(crate) post_recv: unsafe extern "C" fn(*mut IbvQp, *mut IbvRecvWr, *mut *mut IbvRecvWr) -> c_int,
    _compat_fourth: [*const c_void; 5],
}

/// An open device. The library allocates it; only its first fields are read here.
#[repr(C)]
pub(crate) struct IbvContext {
    pub(crate) device: *mut IbvDevice,
    pub(crate) ops: IbvContextOps,
    pub(crate) cmd_fd: c_int,
    pub(crate) async_fd: c_int,
}

/// A protection domain.
#[repr(C)]
pub(crate) struct IbvPd {
    pub(crate) context: *mut IbvContext,
}

/// Registered memory.
#[repr(C)]
pub(crate) struct IbvMr {
    _context: *mut IbvContext,
    _pd: *mut IbvPd,
    _addr: *mut c_void,
    _length: usize,
    _handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

/// A channel of completion events, with a descriptor to sleep on.
#[repr(C)]
pub(crate) struct IbvCompChannel {
    _context: *mut IbvContext,
    pub(crate) fd: c_int,
    _refcnt: c_int,
}

/// A completion queue.
#[repr(C)]
pub(crate) struct IbvCq {
    pub(crate) context: *mut IbvContext,
}

/// A shared receive queue.
#[repr(C)]
pub(crate) struct IbvSrq {
    pub(crate) context: *mut IbvContext,
}

/// A queue pair.
#[repr(C)]
pub(crate) struct IbvQp {
    pub(crate) context: *mut IbvContext,
    _qp_context: *mut c_void,
    _pd: *mut IbvPd,
    _send_cq: *mut IbvCq,
    _recv_cq: *mut IbvCq,
    _srq: *mut IbvSrq,
    _handle: u32,
    pub(crate) qp_num: u32,
}

/// A global identifier of a port.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct IbvGid(pub(crate) [u8; 16]);

/// An entry of a port's table of global identifiers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct IbvGidEntry {
    pub(crate) gid: IbvGid,
    pub(crate) gid_index: u32,
    pub(crate) port_num: u32,
    pub(crate) gid_type: u32,
    pub(crate) ndev_ifindex: u32,
}

/// Limits and abilities of a device.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IbvDeviceAttr {
    pub(crate) fw_ver: [c_char; 64],
    _node_guid: u64,
    _sys_image_guid: u64,
    pub(crate) max_mr_size: u64,
    _page_size_cap: u64,
    pub(crate) vendor_id: u32,
    pub(crate) vendor_part_id: u32,
    _hw_ver: u32,
    pub(crate) max_qp: c_int,
    pub(crate) max_qp_wr: c_int,
    pub(crate) device_cap_flags: c_uint,
    pub(crate) max_sge: c_int,
    _max_sge_rd: c_int,
    pub(crate) max_cq: c_int,
    pub(crate) max_cqe: c_int,
    pub(crate) max_mr: c_int,
    pub(crate) max_pd: c_int,
    pub(crate) max_qp_rd_atom: c_int,
    _max_ee_rd_atom: c_int,
    _max_res_rd_atom: c_int,
    pub(crate) max_qp_init_rd_atom: c_int,
    _max_ee_init_rd_atom: c_int,
    pub(crate) atomic_cap: c_uint,
    _unused: [c_int; 11],
    pub(crate) max_srq: c_int,
    pub(crate) max_srq_wr: c_int,
    _max_srq_sge: c_int,
    _max_pkeys: u16,
    _local_ca_ack_delay: u8,
    pub(crate) phys_port_cnt: u8,
    // The library of a later version may fill more.
    _later: [u64; 32],
}

/// State of a port. The exported function fills only the fields up to `flags`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IbvPortAttr {
    pub(crate) state: c_uint,
    pub(crate) max_mtu: c_uint,
    pub(crate) active_mtu: c_uint,
    pub(crate) gid_tbl_len: c_int,
    pub(crate) port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    _violations: [u32; 2],
    _pkey_tbl_len: u16,
    pub(crate) lid: u16,
    _sm_lid: u16,
    _lmc_to_speed: [u8; 7],
    _phys_state: u8,
    pub(crate) link_layer: u8,
    _flags: u8,
    _later: [u32; 16],
}

/// Sizes of a queue pair's queues.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct IbvQpCap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

/// Request to create a queue pair.
#[repr(C)]
pub(crate) struct IbvQpInitAttr {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut IbvCq,
    pub(crate) recv_cq: *mut IbvCq,
    pub(crate) srq: *mut IbvSrq,
    pub(crate) cap: IbvQpCap,
    pub(crate) qp_type: c_uint,
    pub(crate) sq_sig_all: c_int,
}

/// Request to create a shared receive queue.
#[repr(C)]
pub(crate) struct IbvSrqInitAttr {
    pub(crate) srq_context: *mut c_void,
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) srq_limit: u32,
}

/// The global part of a path.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct IbvGlobalRoute {
    pub(crate) dgid: IbvGid,
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

/// A path to another port.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct IbvAhAttr {
    pub(crate) grh: IbvGlobalRoute,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

/// Attributes by which a queue pair changes its state.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct IbvQpAttr {
    pub(crate) qp_state: c_uint,
    pub(crate) cur_qp_state: c_uint,
    pub(crate) path_mtu: c_uint,
    pub(crate) path_mig_state: c_uint,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    pub(crate) cap: IbvQpCap,
    pub(crate) ah_attr: IbvAhAttr,
    pub(crate) alt_ah_attr: IbvAhAttr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}

/// A piece of local memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct IbvSge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

/// The remote part of a request: for READ and WRITE `| address u64 | rkey u32 |`, for atomics
/// `| address u64 | compare or add u64 | swap u64 | rkey u32 |`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union IbvRemote {
    pub(crate) rdma: IbvRdma,
    pub(crate) atomic: IbvAtomic,
}

/// The remote part of a READ or WRITE.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct IbvRdma {
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
}

/// The remote part of an atomic.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct IbvAtomic {
    pub(crate) remote_addr: u64,
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
    pub(crate) rkey: u32,
}

/// A request to send, read, write, or change a word.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IbvSendWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut IbvSendWr,
    pub(crate) sg_list: *mut IbvSge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: c_uint,
    pub(crate) send_flags: c_uint,
    pub(crate) imm_data: u32,
    pub(crate) wr: IbvRemote,
    // Parts for other kinds of queue pairs.
    _others: [u64; 7],
}

impl IbvSendWr {
    /// A request of this kind, all else zero.
    pub(crate) fn new(opcode: c_uint, send_flags: c_uint) -> IbvSendWr {
        IbvSendWr {
            wr_id: 0,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
            opcode,
            send_flags,
            imm_data: 0,
            wr: IbvRemote { atomic: IbvAtomic::default() },
            _others: [0; 7],
        }
    }
}

/// A request to receive into a buffer.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IbvRecvWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut IbvRecvWr,
    pub(crate) sg_list: *mut IbvSge,
    pub(crate) num_sge: c_int,
}

/// A completion.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct IbvWc {
    pub(crate) wr_id: u64,
    pub(crate) status: c_uint,
    pub(crate) opcode: c_uint,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    pub(crate) imm_data: u32,
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) wc_flags: c_uint,
    _rest: [u16; 4],
}

/// Constants of `infiniband/verbs.h`.
pub(crate) mod is {
    use std::ffi::c_uint;

    pub(crate) const QPT_RC: c_uint = 2;

    pub(crate) const QPS_INIT: c_uint = 1;
    pub(crate) const QPS_RTR: c_uint = 2;
    pub(crate) const QPS_RTS: c_uint = 3;
    pub(crate) const QPS_ERR: c_uint = 6;

    pub(crate) const QP_STATE: c_uint = 1;
    pub(crate) const QP_ACCESS_FLAGS: c_uint = 8;
    pub(crate) const QP_PKEY_INDEX: c_uint = 16;
    pub(crate) const QP_PORT: c_uint = 32;
    pub(crate) const QP_AV: c_uint = 128;
    pub(crate) const QP_PATH_MTU: c_uint = 256;
    pub(crate) const QP_TIMEOUT: c_uint = 512;
    pub(crate) const QP_RETRY_CNT: c_uint = 1024;
    pub(crate) const QP_RNR_RETRY: c_uint = 2048;
    pub(crate) const QP_RQ_PSN: c_uint = 4096;
    pub(crate) const QP_MAX_QP_RD_ATOMIC: c_uint = 8192;
    pub(crate) const QP_MIN_RNR_TIMER: c_uint = 32768;
    pub(crate) const QP_SQ_PSN: c_uint = 65536;
    pub(crate) const QP_MAX_DEST_RD_ATOMIC: c_uint = 131_072;
    pub(crate) const QP_DEST_QPN: c_uint = 1_048_576;

    pub(crate) const WR_RDMA_WRITE: c_uint = 0;
    pub(crate) const WR_SEND: c_uint = 2;
    pub(crate) const WR_RDMA_READ: c_uint = 4;
    pub(crate) const WR_ATOMIC_CMP_AND_SWP: c_uint = 5;
    pub(crate) const WR_ATOMIC_FETCH_AND_ADD: c_uint = 6;

    pub(crate) const SEND_FENCE: c_uint = 1;
    pub(crate) const SEND_SIGNALED: c_uint = 2;
    pub(crate) const SEND_INLINE: c_uint = 8;

    pub(crate) const ACCESS_LOCAL_WRITE: c_uint = 1;
    pub(crate) const ACCESS_REMOTE_WRITE: c_uint = 2;
    pub(crate) const ACCESS_REMOTE_READ: c_uint = 4;
    pub(crate) const ACCESS_REMOTE_ATOMIC: c_uint = 8;

    pub(crate) const WC_SUCCESS: c_uint = 0;
    pub(crate) const WC_REM_INV_REQ_ERR: c_uint = 9;
    pub(crate) const WC_REM_ACCESS_ERR: c_uint = 10;

    pub(crate) const PORT_ACTIVE: c_uint = 4;
    pub(crate) const ATOMIC_HCA: c_uint = 1;
    pub(crate) const ATOMIC_GLOB: c_uint = 2;
    pub(crate) const LINK_LAYER_ETHERNET: u8 = 2;
    pub(crate) const GID_TYPE_ROCE_V2: u32 = 2;
}

/// Declares the functions that are looked up in the library.
macro_rules! library {
    ($($name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The loaded library.
        pub(crate) struct Library {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            fn load() -> Result<Library, String> {
                // SAFETY: the name ends with a zero byte. The library's initializers are those of rdma-core, which only
                // read the environment and files.
                let handle = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
                if handle.is_null() {
                    return Err(last_error());
                }
                Ok(Library {
                    $($name: {
                        let name = concat!(stringify!($name), "\0");
                        // SAFETY: the handle is of a loaded library, and the name ends with a zero byte.
                        let function = unsafe { libc::dlsym(handle, name.as_ptr().cast()) };
                        if function.is_null() {
                            return Err(format!("it has no {}", stringify!($name)));
                        }
                        // SAFETY: the library's function of this name has this type, by its public header. The library
                        // is never unloaded.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(function)
                        }
                    },)*
                })
            }
        }
    };
}

library! {
    ibv_get_device_list(*mut c_int) -> *mut *mut IbvDevice;
    ibv_free_device_list(*mut *mut IbvDevice);
    ibv_get_device_name(*mut IbvDevice) -> *const c_char;
    ibv_open_device(*mut IbvDevice) -> *mut IbvContext;
    ibv_close_device(*mut IbvContext) -> c_int;
    ibv_query_device(*mut IbvContext, *mut IbvDeviceAttr) -> c_int;
    ibv_query_port(*mut IbvContext, u8, *mut IbvPortAttr) -> c_int;
    _ibv_query_gid_table(*mut IbvContext, *mut IbvGidEntry, usize, u32, usize) -> isize;
    ibv_alloc_pd(*mut IbvContext) -> *mut IbvPd;
    ibv_dealloc_pd(*mut IbvPd) -> c_int;
    ibv_reg_mr_iova(*mut IbvPd, *mut c_void, usize, u64, c_int) -> *mut IbvMr;
    ibv_dereg_mr(*mut IbvMr) -> c_int;
    ibv_create_comp_channel(*mut IbvContext) -> *mut IbvCompChannel;
    ibv_destroy_comp_channel(*mut IbvCompChannel) -> c_int;
    ibv_create_cq(*mut IbvContext, c_int, *mut c_void, *mut IbvCompChannel, c_int) -> *mut IbvCq;
    ibv_destroy_cq(*mut IbvCq) -> c_int;
    ibv_get_cq_event(*mut IbvCompChannel, *mut *mut IbvCq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events(*mut IbvCq, c_uint);
    ibv_create_srq(*mut IbvPd, *mut IbvSrqInitAttr) -> *mut IbvSrq;
    ibv_destroy_srq(*mut IbvSrq) -> c_int;
    ibv_create_qp(*mut IbvPd, *mut IbvQpInitAttr) -> *mut IbvQp;
    ibv_modify_qp(*mut IbvQp, *mut IbvQpAttr, c_int) -> c_int;
    ibv_destroy_qp(*mut IbvQp) -> c_int;
    ibv_wc_status_str(c_uint) -> *const c_char;
}

/// Returns the library, which the first call loads.
///
/// # Errors
/// The loader's reason why the library is unusable.
pub(crate) fn library() -> Result<&'static Library, &'static str> {
    static LOADED: OnceLock<Result<Library, String>> = OnceLock::new();
    LOADED.get_or_init(Library::load).as_ref().map_err(String::as_str)
}

fn last_error() -> String {
    // SAFETY: returns null, or a text that ends with a zero byte and stays until this thread's next call of the loader.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "the loader gives no reason".to_owned();
    }
    // SAFETY: as above; the text is copied at once.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// The numbers are those that a C program prints for rdma-core 44 on a 64-bit machine.
    #[test]
    fn layouts_are_those_of_the_c_header() {
        let ops = [
            offset_of!(IbvContextOps, poll_cq),
            offset_of!(IbvContextOps, req_notify_cq),
            offset_of!(IbvContextOps, post_srq_recv),
            offset_of!(IbvContextOps, post_send),
            offset_of!(IbvContextOps, post_recv),
            size_of::<IbvContextOps>(),
        ];
        assert_eq!(ops, [88, 96, 160, 200, 208, 256]);
        assert_eq!([offset_of!(IbvContext, ops), offset_of!(IbvContext, async_fd)], [8, 268]);
        let device = [
            offset_of!(IbvDeviceAttr, max_mr_size),
            offset_of!(IbvDeviceAttr, vendor_id),
            offset_of!(IbvDeviceAttr, max_qp),
            offset_of!(IbvDeviceAttr, device_cap_flags),
            offset_of!(IbvDeviceAttr, max_cqe),
            offset_of!(IbvDeviceAttr, max_mr),
            offset_of!(IbvDeviceAttr, max_qp_rd_atom),
            offset_of!(IbvDeviceAttr, max_qp_init_rd_atom),
            offset_of!(IbvDeviceAttr, atomic_cap),
            offset_of!(IbvDeviceAttr, max_srq_wr),
            offset_of!(IbvDeviceAttr, phys_port_cnt),
        ];
        assert_eq!(device, [80, 96, 108, 116, 132, 136, 144, 156, 164, 216, 227]);
        assert!(size_of::<IbvDeviceAttr>() >= 232 && size_of::<IbvPortAttr>() >= 52);
        let port = [
            offset_of!(IbvPortAttr, active_mtu),
            offset_of!(IbvPortAttr, max_msg_sz),
            offset_of!(IbvPortAttr, lid),
            offset_of!(IbvPortAttr, link_layer),
        ];
        assert_eq!(port, [8, 20, 34, 46]);
        assert_eq!([offset_of!(IbvMr, lkey), offset_of!(IbvMr, rkey)], [36, 40]);
        assert_eq!([offset_of!(IbvQp, qp_num), offset_of!(IbvCompChannel, fd)], [52, 8]);
        let gid = [offset_of!(IbvGidEntry, gid_index), offset_of!(IbvGidEntry, gid_type)];
        assert_eq!((gid, size_of::<IbvGidEntry>()), ([16, 24], 32));
        let init = [offset_of!(IbvQpInitAttr, cap), offset_of!(IbvQpInitAttr, qp_type)];
        assert_eq!((init, size_of::<IbvQpInitAttr>()), ([32, 52], 64));
        assert_eq!((offset_of!(IbvSrqInitAttr, max_wr), size_of::<IbvSrqInitAttr>()), (8, 24));
        let attr = [
            offset_of!(IbvQpAttr, rq_psn),
            offset_of!(IbvQpAttr, qp_access_flags),
            offset_of!(IbvQpAttr, ah_attr),
            offset_of!(IbvQpAttr, pkey_index),
            offset_of!(IbvQpAttr, max_rd_atomic),
            offset_of!(IbvQpAttr, port_num),
            offset_of!(IbvQpAttr, rnr_retry),
            offset_of!(IbvQpAttr, rate_limit),
            size_of::<IbvQpAttr>(),
        ];
        assert_eq!(attr, [20, 32, 56, 120, 126, 129, 132, 136, 144]);
        let path = [
            offset_of!(IbvGlobalRoute, sgid_index),
            offset_of!(IbvAhAttr, dlid),
            offset_of!(IbvAhAttr, is_global),
            offset_of!(IbvAhAttr, port_num),
            size_of::<IbvAhAttr>(),
        ];
        assert_eq!(path, [20, 24, 29, 30, 32]);
        let send = [
            offset_of!(IbvSendWr, sg_list),
            offset_of!(IbvSendWr, opcode),
            offset_of!(IbvSendWr, send_flags),
            offset_of!(IbvSendWr, wr),
            offset_of!(IbvRdma, rkey),
            offset_of!(IbvAtomic, swap),
            offset_of!(IbvAtomic, rkey),
            size_of::<IbvSendWr>(),
        ];
        assert_eq!(send, [16, 28, 32, 40, 8, 16, 24, 128]);
        assert_eq!((offset_of!(IbvRecvWr, num_sge), size_of::<IbvRecvWr>()), (24, 32));
        let wc = [offset_of!(IbvWc, status), offset_of!(IbvWc, byte_len), offset_of!(IbvWc, qp_num)];
        assert_eq!((wc, size_of::<IbvWc>()), ([8, 20, 28], 48));
    }

    #[test]
    fn a_missing_library_is_reported_and_nothing_else_happens() {
        match library() {
            Ok(library) => assert!(library.ibv_get_device_list as usize != 0),
            Err(reason) => assert!(reason.contains("libibverbs"), "{reason}"),
        }
    }
}
