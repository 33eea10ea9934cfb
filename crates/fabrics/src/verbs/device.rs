//! The host's RDMA devices: their ports, addresses, limits and capabilities.
//!
//! [`devices`] opens every device for a moment, so it runs only when a user has asked for RDMA. The choice of a port
//! and of an address is a function of what was read.

use super::sys::{self, IbvContext, IbvDevice, IbvDeviceAttr, IbvGidEntry, IbvPortAttr, Library, is};
use farside_remote::Capabilities;
use std::ffi::{CStr, c_int};
use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv6Addr};

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Name of the device, such as `mlx5_0`.
    pub name: String,
    /// The device's ports, in the order of their numbers.
    pub ports: Vec<Port>,
    /// Which atomics exclude each other.
    pub atomics: Atomics,
    /// Limits of the device.
    pub limits: Limits,
    /// Whether the host's CPU does the work of the device, as with Soft-RoCE.
    pub is_software: bool,
}

/// Which atomics on a word exclude each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atomics {
    /// The device has no atomics.
    None,
    /// Atomics by this device. The CPU and other devices may interfere.
    Device,
    /// Atomics by this device, by others and by the CPU.
    Global,
}

/// Limits of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Number of queue pairs.
    pub max_qp: u32,
    /// Number of requests that a queue holds.
    pub max_qp_wr: u32,
    /// Number of pieces of memory of a request.
    pub max_sge: u32,
    /// Number of completions that a queue holds.
    pub max_cqe: u32,
    /// Number of registered regions.
    pub max_mr: u32,
    /// Size of a registered region in bytes.
    pub max_mr_size: u64,
    /// Number of requests that a shared receive queue holds.
    pub max_srq_wr: u32,
    /// Number of READs and atomics that a queue pair serves at a time.
    pub max_qp_rd_atom: u32,
    /// Number of READs and atomics that a queue pair has in flight.
    pub max_qp_init_rd_atom: u32,
}

/// A port of an RDMA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Number of the port, counted from 1.
    pub number: u8,
    /// Whether the port can send and receive.
    pub active: bool,
    /// Whether the port's network is Ethernet, on which RDMA is RoCE.
    pub link_ethernet: bool,
    /// Largest payload of a packet in bytes, as the port and its network have agreed on.
    pub mtu: u32,
    /// Address within a subnet of InfiniBand; 0 on Ethernet.
    pub lid: u16,
    /// Global addresses of the port, in the order of their indices. Empty entries of the table are left out.
    pub gids: Vec<Gid>,
}

/// Entry of a port's table of global identifiers: an address of the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Index in the port's table.
    pub index: u32,
    /// The identifier, in the form of an IPv6 address.
    pub bytes: [u8; 16],
    /// Whether packets from this address are RoCE over UDP and IP, which routers forward.
    pub roce_v2: bool,
    /// The IP address; `None` for an identifier that is none, or is valid on one link only.
    pub address: Option<IpAddr>,
}

/// Error: no RDMA device can be used. The message says what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unavailable {
    /// The library is missing or unusable, for this reason.
    Library(String),
    /// The system lists no device.
    NoDevices,
    /// A device cannot be opened or queried.
    Refused {
        /// Name of the device.
        device: String,
        /// The failed step, and the system's reason.
        reason: String,
    },
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unavailable::Library(reason) => write!(
                f,
                "RDMA's library cannot be loaded: {reason}; install it: libibverbs1 and ibverbs-providers (Debian, \
                 Ubuntu), or libibverbs (Fedora, RHEL)"
            ),
            Unavailable::NoDevices => f.write_str(
                "no RDMA device is found; load the driver of the NIC and the package of its provider \
                 (ibverbs-providers), or give the container /dev/infiniband",
            ),
            Unavailable::Refused { device, reason } => write!(
                f,
                "RDMA device {device} cannot be used: {reason}; check that this user may open the files in \
                 /dev/infiniband, and that the limit on locked memory is not reached (ulimit -l)"
            ),
        }
    }
}

impl std::error::Error for Unavailable {}

impl Device {
    /// Capabilities of the device alone, without those of the node's CPU.
    ///
    /// libibverbs has no masked atomics and no words in the NIC's memory that all vendors share. A software device
    /// copies lines with the CPU, so a line may be read while it is written.
    pub fn capabilities(&self) -> Capabilities {
        if self.is_software { Capabilities::NONE } else { Capabilities::WHOLE_LINES }
    }

    /// Returns the port that a connection uses: the one with this number, or else the first active one.
    ///
    /// # Errors
    /// The device has no such port, or the port is down. The message says what to do.
    pub fn port(&self, number: Option<u8>) -> Result<&Port, String> {
        let name = &self.name;
        let port = match number {
            Some(number) => self.ports.iter().find(|port| port.number == number).ok_or_else(|| {
                format!("RDMA device {name} has no port {number}; its ports are 1 to {}", self.ports.len())
            })?,
            None => self
                .ports
                .iter()
                .find(|port| port.active)
                .or(self.ports.first())
                .ok_or_else(|| format!("RDMA device {name} has no port; use another device"))?,
        };
        match port.active {
            true => Ok(port),
            false => Err(format!(
                "port {} of RDMA device {name} is down; set its interface up (ip link set INTERFACE up), and check the \
                 cable",
                port.number
            )),
        }
    }
}

impl Port {
    /// Returns the address that a connection uses: the one with this index, or else the one that suits best. On
    /// Ethernet, that is an IPv4 address of RoCE v2, then another address of RoCE v2, then any.
    ///
    /// # Errors
    /// There is no such entry. The message says what to do.
    pub fn gid(&self, index: Option<u32>) -> Result<&Gid, String> {
        let number = self.number;
        match index {
            Some(index) => self.gids.iter().find(|gid| gid.index == index).ok_or_else(|| {
                let indices: Vec<String> = self.gids.iter().map(|gid| gid.index.to_string()).collect();
                let indices = if indices.is_empty() { "none".into() } else { indices.join(", ") };
                format!("port {number} has no GID {index}; it has {indices}")
            }),
            None => self.gids.iter().min_by_key(|gid| gid.rank()).ok_or_else(|| {
                format!(
                    "the GID table of port {number} is empty; give the port's interface an address (ip addr add \
                     ADDRESS dev INTERFACE)"
                )
            }),
        }
    }
}

impl Gid {
    fn of(entry: &IbvGidEntry) -> Gid {
        let bytes = entry.gid.0;
        let address = Ipv6Addr::from(bytes);
        let address = match address.to_ipv4_mapped() {
            Some(address) => Some(IpAddr::V4(address)),
            // Unicast, and valid beyond one link.
            None => (address.segments()[0] & 0xe000 == 0x2000 || address.segments()[0] & 0xfe00 == 0xfc00)
                .then_some(IpAddr::V6(address)),
        };
        Gid { index: entry.gid_index, bytes, roce_v2: entry.gid_type == is::GID_TYPE_ROCE_V2, address }
    }

    /// Order of preference; the least is best.
    fn rank(&self) -> (bool, bool, bool) {
        (!self.roce_v2, self.address.is_none(), !self.address.is_some_and(|address| address.is_ipv4()))
    }
}

/// Prints for example `GID 1 (10.0.0.7, RoCE v2)`.
impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.roce_v2 { ", RoCE v2" } else { "" };
        match self.address {
            Some(address) => write!(f, "GID {} ({address}{kind})", self.index),
            None => write!(f, "GID {} ({}{kind})", self.index, Ipv6Addr::from(self.bytes)),
        }
    }
}

/// Returns the host's RDMA devices, sorted by name. There is at least one.
///
/// # Errors
/// The library is missing, there is no device, or a device cannot be opened.
pub fn devices() -> Result<Vec<Device>, Unavailable> {
    let library = sys::library().map_err(|reason| Unavailable::Library(reason.to_owned()))?;
    let list = List::new(library)?;
    let mut devices =
        list.names().map(|(device, name)| query(library, device, name)).collect::<Result<Vec<_>, _>>()?;
    devices.sort_by(|a: &Device, b: &Device| a.name.cmp(&b.name));
    if devices.is_empty() { Err(Unavailable::NoDevices) } else { Ok(devices) }
}

/// The library's list of devices.
struct List {
    library: &'static Library,
    first: *mut *mut IbvDevice,
    count: usize,
}

impl List {
    fn new(library: &'static Library) -> Result<List, Unavailable> {
        let mut count: c_int = 0;
        // SAFETY: the library writes the length of its list into `count`.
        let first = unsafe { (library.ibv_get_device_list)(&raw mut count) };
        if first.is_null() {
            // Without the kernel's part of RDMA, the library reports "function not implemented".
            return match io::Error::last_os_error() {
                error if error.raw_os_error() == Some(libc::ENOSYS) => Err(Unavailable::NoDevices),
                error => Err(Unavailable::Library(format!("it lists no devices: {error}"))),
            };
        }
        Ok(List { library, first, count: usize::try_from(count).unwrap_or(0) })
    }

    /// Returns the devices with their names. A device is valid until the list is dropped.
    fn names(&self) -> impl Iterator<Item = (*mut IbvDevice, String)> {
        (0..self.count).map(|index| {
            // SAFETY: the library's array has `count` devices until `self` drops.
            let device = unsafe { *self.first.add(index) };
            // SAFETY: the device is in the list; its name is a text that ends with a zero byte, and is copied at once.
            let name = unsafe { CStr::from_ptr((self.library.ibv_get_device_name)(device)) };
            (device, name.to_string_lossy().into_owned())
        })
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: the list is the library's and was not freed before. No device of it is used afterwards.
        unsafe { (self.library.ibv_free_device_list)(self.first) };
    }
}

/// A device that is open for queries.
struct Opened {
    library: &'static Library,
    context: *mut IbvContext,
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: the context was opened by the library, and nothing was created in it.
        unsafe { (self.library.ibv_close_device)(self.context) };
    }
}

fn query(library: &'static Library, device: *mut IbvDevice, name: String) -> Result<Device, Unavailable> {
    let refused = |step: &str, error: io::Error| Unavailable::Refused {
        device: name.clone(),
        reason: format!("{step}: {error}"),
    };
    // SAFETY: the device is in the list of the caller, which still exists.
    let context = unsafe { (library.ibv_open_device)(device) };
    if context.is_null() {
        return Err(refused("cannot be opened", io::Error::last_os_error()));
    }
    let opened = Opened { library, context };
    let mut attributes = MaybeUninit::<IbvDeviceAttr>::zeroed();
    // SAFETY: the context is open, and the library fills at most an `ibv_device_attr`, which is smaller than this.
    let failed = unsafe { (library.ibv_query_device)(opened.context, attributes.as_mut_ptr()) };
    if failed != 0 {
        return Err(refused("its limits cannot be read", io::Error::from_raw_os_error(failed)));
    }
    // SAFETY: all fields are numbers, for which zero is valid; the library has written the others.
    let attributes = unsafe { attributes.assume_init() };
    let gids = gids(&opened).map_err(|error| refused("its GID table cannot be read", error))?;
    let ports = (1..=attributes.phys_port_cnt)
        .map(|number| port(&opened, number, &gids).map_err(|error| refused("a port cannot be read", error)))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(Device {
        ports,
        atomics: match attributes.atomic_cap {
            is::ATOMIC_HCA => Atomics::Device,
            is::ATOMIC_GLOB => Atomics::Global,
            _ => Atomics::None,
        },
        limits: limits(&attributes),
        is_software: attributes.vendor_id == SOFT_ROCE,
        name,
    })
}

/// Vendor of Soft-RoCE (`RXE_VENDOR_ID` of Linux).
const SOFT_ROCE: u32 = 0xff_ffff;

fn limits(attributes: &IbvDeviceAttr) -> Limits {
    let number = |limit: c_int| u32::try_from(limit).unwrap_or(0);
    Limits {
        max_qp: number(attributes.max_qp),
        max_qp_wr: number(attributes.max_qp_wr),
        max_sge: number(attributes.max_sge),
        max_cqe: number(attributes.max_cqe),
        max_mr: number(attributes.max_mr),
        max_mr_size: attributes.max_mr_size,
        max_srq_wr: number(attributes.max_srq_wr),
        max_qp_rd_atom: number(attributes.max_qp_rd_atom),
        max_qp_init_rd_atom: number(attributes.max_qp_init_rd_atom),
    }
}

/// Returns the addresses of all ports of a device.
fn gids(opened: &Opened) -> io::Result<Vec<IbvGidEntry>> {
    const ENTRIES_MAX: usize = 1024;
    let mut entries = vec![IbvGidEntry::default(); ENTRIES_MAX];
    let size = size_of::<IbvGidEntry>();
    // SAFETY: the context is open, and the library writes at most `ENTRIES_MAX` entries of this size.
    let count = unsafe {
        (opened.library._ibv_query_gid_table)(opened.context, entries.as_mut_ptr(), ENTRIES_MAX, 0, size)
    };
    match usize::try_from(count) {
        Ok(count) => {
            entries.truncate(count);
            Ok(entries)
        }
        Err(_) => Err(io::Error::from_raw_os_error(count.unsigned_abs().try_into().unwrap_or(libc::EIO))),
    }
}

fn port(opened: &Opened, number: u8, gids: &[IbvGidEntry]) -> io::Result<Port> {
    let mut attributes = MaybeUninit::<IbvPortAttr>::zeroed();
    // SAFETY: the context is open, and the library fills at most an `ibv_port_attr`, which is smaller than this.
    let failed = unsafe { (opened.library.ibv_query_port)(opened.context, number, attributes.as_mut_ptr()) };
    if failed != 0 {
        return Err(io::Error::from_raw_os_error(failed));
    }
    // SAFETY: all fields are numbers, for which zero is valid; the library has written the others.
    let attributes = unsafe { attributes.assume_init() };
    let of_port = gids.iter().filter(|entry| entry.port_num == u32::from(number));
    let mut gids: Vec<Gid> = of_port.map(Gid::of).collect();
    gids.sort_by_key(|gid| gid.index);
    Ok(Port {
        number,
        active: attributes.state == is::PORT_ACTIVE,
        link_ethernet: attributes.link_layer == is::LINK_LAYER_ETHERNET,
        mtu: mtu_bytes(attributes.active_mtu),
        lid: attributes.lid,
        gids,
    })
}

/// Returns the size in bytes of `enum ibv_mtu`, whose values are 1 for 256 bytes to 5 for 4096 bytes.
fn mtu_bytes(mtu: u32) -> u32 {
    128 << mtu.clamp(1, 5)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::sys::IbvGid;

    fn gid(index: u32, address: &str, kind: u32) -> Gid {
        let gid = IbvGid(address.parse::<Ipv6Addr>().expect("an address").octets());
        Gid::of(&IbvGidEntry { gid, gid_index: index, port_num: 1, gid_type: kind, ndev_ifindex: 2 })
    }

    fn port(number: u8, active: bool, gids: &[Gid]) -> Port {
        Port { number, active, link_ethernet: true, mtu: 1024, lid: 0, gids: gids.to_vec() }
    }

    fn device(ports: Vec<Port>) -> Device {
        let limits = Limits {
            max_qp: 1,
            max_qp_wr: 1,
            max_sge: 1,
            max_cqe: 1,
            max_mr: 1,
            max_mr_size: 1,
            max_srq_wr: 1,
            max_qp_rd_atom: 1,
            max_qp_init_rd_atom: 1,
        };
        Device { name: "a0".into(), ports, atomics: Atomics::Device, limits, is_software: false }
    }

    #[test]
    fn the_best_address_can_be_routed() {
        const ROCE_V1: u32 = 1;
        let v2 = is::GID_TYPE_ROCE_V2;
        let all = [
            gid(0, "fe80::1", ROCE_V1),
            gid(1, "fe80::1", v2),
            gid(2, "::ffff:10.0.0.7", ROCE_V1),
            gid(3, "2001:db8::7", v2),
            gid(4, "::ffff:10.0.0.7", v2),
            gid(5, "::ffff:10.0.0.8", v2),
        ];
        for (known, expected) in [(6, 4), (4, 3), (3, 1), (1, 0)] {
            let chosen = port(1, true, &all[..known]).gid(None).map(|gid| gid.index);
            assert_eq!(chosen, Ok(expected), "of {known}");
        }
        assert!(port(1, true, &[]).gid(None).unwrap_err().contains("ip addr add"));
        assert_eq!(port(1, true, &all).gid(Some(2)).map(|gid| gid.index), Ok(2));
        assert!(port(1, true, &all[..2]).gid(Some(7)).unwrap_err().contains("no GID 7; it has 0, 1"));
        assert_eq!(all[4].to_string(), "GID 4 (10.0.0.7, RoCE v2)");
        assert_eq!(all[0].to_string(), "GID 0 (fe80::1)");
        assert_eq!((all[1].address, all[3].address.is_some()), (None, true));
    }

    #[test]
    fn the_first_active_port_is_used_unless_one_is_named() {
        let both = device(vec![port(1, false, &[]), port(2, true, &[])]);
        assert_eq!(both.port(None).map(|port| port.number), Ok(2));
        assert!(
            both.port(Some(1))
                .unwrap_err()
                .contains("port 1 of RDMA device a0 is down; set its interface up")
        );
        assert!(both.port(Some(3)).unwrap_err().contains("no port 3; its ports are 1 to 2"));
        assert!(
            device(vec![port(1, false, &[])])
                .port(None)
                .unwrap_err()
                .contains("port 1 of RDMA device a0 is down")
        );
        assert!(device(Vec::new()).port(None).unwrap_err().contains("has no port"));
    }

    #[test]
    fn sizes_of_packets_are_converted_to_bytes() {
        assert_eq!([1, 2, 3, 4, 5].map(mtu_bytes), [256, 512, 1024, 2048, 4096]);
        assert_eq!((mtu_bytes(0), mtu_bytes(u32::MAX)), (256, 4096));
    }

    #[test]
    fn only_a_nic_of_its_own_has_whole_lines() {
        assert_eq!(device(Vec::new()).capabilities(), Capabilities::WHOLE_LINES);
        let soft = Device { is_software: true, ..device(Vec::new()) };
        assert_eq!(soft.capabilities(), Capabilities::NONE);
    }

    #[test]
    fn an_error_names_the_remedy() {
        let library = Unavailable::Library("libibverbs.so.1: cannot open shared object file".into());
        assert!(library.to_string().contains("install it: libibverbs1 and ibverbs-providers"));
        assert!(Unavailable::NoDevices.to_string().contains("/dev/infiniband"));
        let refused = Unavailable::Refused { device: "a0".into(), reason: "cannot be opened: denied".into() };
        assert!(refused.to_string().contains("RDMA device a0 cannot be used: cannot be opened: denied"));
    }

    #[test]
    fn without_a_device_the_reason_is_an_error() {
        match devices() {
            Ok(devices) => {
                assert!(!devices.is_empty() && devices.iter().all(|device| !device.name.is_empty()))
            }
            Err(Unavailable::Library(reason)) => assert!(!reason.is_empty()),
            Err(Unavailable::NoDevices) => {}
            Err(refused) => println!("a device is here, and this user may not open it: {refused}"),
        }
    }
}
