//! Buffers of the library (`ibv_alloc_buf(3)`), and registration by attributes
//! (`ibv_reg_mr_ex(3)`). A buffer is ordinary memory, as with a driver that allocates none itself.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::Arc;

use rnic_client::Function;

use crate::c::{self, ibv_buf, ibv_mr, ibv_mr_init_attr, ibv_pd};
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::{Body, Kind, live, publish, withdraw};
use crate::ffi::pointers::{In, Out, get};
use crate::verbs::mr::register;
use crate::verbs::pd::PdBody;

/// Memory of a buffer, which is freed when this is dropped.
struct BufBody {
    memory: NonNull<u8>,
    layout: Layout,
}

impl Body for BufBody {
    type Head = ibv_buf;
    const KIND: Kind = Kind::Buf;
}

impl BufBody {
    fn allocate(size: usize) -> Result<BufBody, Errno> {
        let no_memory = || errno!(libc::ENOMEM, "a buffer of {size} bytes");
        // The allocator has no blocks of 0 bytes.
        let layout = Layout::from_size_align(size.max(1), rustix::param::page_size())
            .map_err(|_| no_memory())?;
        // SAFETY: the size is not 0.
        let memory = NonNull::new(unsafe { alloc(layout) }).ok_or_else(no_memory)?;
        Ok(BufBody { memory, layout })
    }
}

impl Drop for BufBody {
    fn drop(&mut self) {
        // SAFETY: `allocate` got the block with this layout, and nothing else frees it.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) };
    }
}

fn alloc_buf(
    pd: *mut ibv_pd,
    size: usize,
    handle: Out<*mut ibv_buf>,
) -> Result<*mut c_void, Errno> {
    let found = live::<Arc<PdBody>>(pd)?;
    let handle = handle.required("buf")?;
    found.admit(Function::AllocBuf)?;
    let body = BufBody::allocate(size)?;
    let addr = body.memory.as_ptr().cast();
    handle.write(publish(ibv_buf { pd, addr, size }, body).as_ptr());
    Ok(addr)
}

fn free_buf(buf: *mut ibv_buf) -> Result<(), Errno> {
    // SAFETY: no thread uses `buf`, now or later (ibv_free_buf(3)).
    unsafe { withdraw::<BufBody>(buf) }.map(drop)
}

/// Fails: the buffer is no DMA buffer.
fn export_buf(buf: *mut ibv_buf) -> Result<(), Errno> {
    live::<BufBody>(buf)?;
    Err(errno!(libc::ENODATA, "the buffer is ordinary memory"))
}

fn reg_buf_mr(
    pd: *mut ibv_pd,
    buf: *mut ibv_buf,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> Result<*mut ibv_mr, Errno> {
    check_range(pd, buf, addr, length)?;
    register(pd, addr, length, None, access.cast_unsigned())
}

/// Checks that the range belongs to the buffer, and the buffer to the PD.
fn check_range(
    pd: *mut ibv_pd,
    buf: *mut ibv_buf,
    addr: *mut c_void,
    length: usize,
) -> Result<(), Errno> {
    let buf = live::<BufBody>(buf)?;
    if get!(buf.pd) != pd {
        return Err(invalid!("the buffer was allocated with another protection domain"));
    }
    let base = get!(buf.addr);
    let size = get!(buf.size);
    let offset = addr.addr().checked_sub(base.addr());
    let fits = |offset| offset <= size && length <= size - offset;
    if offset.is_some_and(fits) {
        Ok(())
    } else {
        Err(invalid!("{length} bytes at {addr:p} are not within {size} bytes at {base:p}"))
    }
}

fn reg_mr_ex(pd: *mut ibv_pd, attr: In<ibv_mr_init_attr>) -> Result<*mut ibv_mr, Errno> {
    // SAFETY: `buf`, which programs of rdma-core 63 and older lack, is the last field. The others
    // are numbers and pointers.
    let wanted = unsafe {
        let length = offset_of!(ibv_mr_init_attr, buf);
        attr.read_prefix("mr_init_attr", ibv_mr_init_attr::default(), length)?
    };
    let mask = wanted.comp_mask;
    let ibv_mr_init_attr { addr, length, access, .. } = wanted;
    let of_device = c::IBV_REG_MR_MASK_FD | c::IBV_REG_MR_MASK_FD_OFFSET;
    if mask & c::IBV_REG_MR_MASK_BUF != 0 {
        if mask & of_device != 0 || mask & c::IBV_REG_MR_MASK_ADDR == 0 {
            return Err(invalid!(
                "comp_mask {mask:#x}: a buffer needs an address and no descriptor"
            ));
        }
        check_range(pd, attr.read("mr_init_attr")?.buf, addr, length)?;
    }
    let served =
        c::IBV_REG_MR_MASK_IOVA | c::IBV_REG_MR_MASK_ADDR | c::IBV_REG_MR_MASK_BUF | of_device;
    if mask & !served != 0 || mask & c::IBV_REG_MR_MASK_FD != 0 {
        return Err(unsupported!("comp_mask {mask:#x}: no DMA handles, no memory of devices"));
    }
    if mask & c::IBV_REG_MR_MASK_ADDR == 0 || mask & of_device != 0 {
        return Err(invalid!("comp_mask {mask:#x}: an address is needed, and no offset"));
    }
    let iova = (mask & c::IBV_REG_MR_MASK_IOVA != 0).then_some(wanted.iova);
    register(pd, addr, length, iova, access.cast_unsigned())
}

entry! {
    uncancelled ibv_alloc_buf(
        pd: *mut ibv_pd, size: usize, buf: Out<*mut ibv_buf>,
    ) -> pointer<c_void> = alloc_buf;
    uncancelled ibv_free_buf(buf: *mut ibv_buf) -> nothing = free_buf;
    uncancelled ibv_export_buf_dmabuf_fd(buf: *mut ibv_buf) -> minus_one = export_buf;
    uncancelled ibv_reg_buf_mr(
        pd: *mut ibv_pd, buf: *mut ibv_buf, addr: *mut c_void, length: usize, access: c_int,
    ) -> pointer<ibv_mr> = reg_buf_mr;
    uncancelled ibv_reg_mr_ex(
        pd: *mut ibv_pd, attr: In<ibv_mr_init_attr>,
    ) -> pointer<ibv_mr> = reg_mr_ex;
}
